"""What callers ask of a commit beside puts: deletes, barriers; and that a journal is full."""

from __future__ import annotations

from collections.abc import Callable

from tablespace._core.commit_queue import Request
from tablespace.errors import FullError
from tablespace.journal import Journal


class JournalFullError(FullError):
    """The journal could not grow; nothing of the group was appended."""

    def __init__(self, message: str, journal: Journal) -> None:
        super().__init__(message)
        self.journal = journal


class DeleteRequest(Request):
    """Keys to delete; `removed` says which were there.

    With `evicts` they leave as evicted ones do: the journal says so, and they are counted.
    """

    def __init__(self, keys: list[bytes], evicts: bool = False) -> None:
        self.keys = keys
        self.evicts = evicts
        self.count = len(keys)
        self.removed: list[bool] = [False] * len(keys)


class Barrier(Request):
    """A function to run between two commits, by whichever thread leads."""

    def __init__(self, action: Callable[[], None]) -> None:
        self.action = action
