"""What callers ask of a commit: items of puts, deletes, barriers; and that a journal is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tablespace._core.commit_queue import Request
from tablespace.errors import FullError
from tablespace.journal import Journal


class JournalFullError(FullError):
    """The journal could not grow; nothing of the group was appended."""

    def __init__(self, message: str, journal: Journal) -> None:
        super().__init__(message)
        self.journal = journal


def checked_item(item: Sequence[Any]) -> Sequence[Any]:
    """Return an item of a `put_many`.

    Raises
    ------
    TypeError
        For what is neither a pair nor a triple.
    """
    if not isinstance(item, (tuple, list)) or not 2 <= len(item) <= 3:
        raise TypeError(
            "an item is (key, value) or (key, value, metadata), not "
            + (f"{len(item)} values" if isinstance(item, (tuple, list)) else type(item).__name__)
            + ". Remedy: of a dict, its items()"
        )
    return item


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
