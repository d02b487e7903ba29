"""Remembers what a daemon promised, to hold it to that after a crash."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from kvd.namespaces import disk_prefix
from kvd.replay.content import key_of
from kvd.replay.journal import JournalFollower


def long_key(namespace: str, hash_id: int) -> bytes:
    """Return the key a block has in the region: SHA-256(namespace)[:16], then its own key."""
    return disk_prefix(namespace) + key_of(hash_id)


@dataclass(frozen=True)
class Verdict:
    """What the promises of a ledger were worth.

    Parameters
    ----------
    confirmed : int
        Blocks that were confirmed durable.
    found : int
        Of these, blocks read back after the crash.
    evicted : int
        Of the rest, blocks that the journal says were evicted after they were confirmed.
    lost : list of int
        Hash ids of what is left: confirmed, never evicted, gone.
    """

    confirmed: int
    found: int
    evicted: int
    lost: list[int]


class Ledger:
    """Which blocks are confirmed durable, and at which journal position.

    Parameters
    ----------
    namespace : str
        Name of the namespace the blocks are in.
    region : pathlib.Path
        The region's directory; its journal says what was evicted.
    """

    def __init__(self, namespace: str, region: Path) -> None:
        self._namespace = namespace
        self._journal = JournalFollower(region / "index.log")
        # Each with a journal position from before its put began.
        self._unconfirmed: dict[int, int] = {}
        self._position = 0
        self._confirmed: dict[int, int] = {}

    def store(self, hash_ids: Iterable[int]) -> None:
        """Note blocks whose put was acknowledged: from now on they wait for confirmation."""
        for hash_id in hash_ids:
            self._unconfirmed[hash_id] = self._position
        self._position = self._journal.poll()

    def waiting(self) -> list[int]:
        """Return the blocks stored and not yet confirmed, oldest first."""
        return list(self._unconfirmed)

    def position(self) -> int:
        """Read the journal on and return its last sequence number.

        Notes
        -----
        Taken *before* the confirmation is asked for, it makes every eviction that could have
        followed the confirmation a later one.
        """
        self._position = self._journal.poll()
        return self._position

    def confirm(self, hash_ids: Iterable[int], position: int) -> None:
        """Note blocks as durable and there, seen after the journal had reached ``position``."""
        for hash_id in hash_ids:
            self._unconfirmed.pop(hash_id, None)
            self._confirmed[hash_id] = position

    def confirm_stored(self, hash_ids: Iterable[int]) -> None:
        """Note blocks as durable since their puts: a flush does not say that they stayed.

        A block may be evicted soon after it was written, before anybody asks.
        """
        for hash_id in hash_ids:
            self._confirmed[hash_id] = self._unconfirmed.pop(hash_id)

    def confirmed(self) -> list[int]:
        """Return the blocks confirmed durable."""
        return list(self._confirmed)

    def forget_unconfirmed(self) -> None:
        """Drop the blocks that a crash caught unconfirmed: present or not, both are right."""
        self._unconfirmed.clear()

    def judge(self, absent: Iterable[int]) -> Verdict:
        """Return the verdict on all confirmed blocks, given those that were not found.

        Blocks that were evicted since, or are lost, are no longer held to be confirmed.
        """
        self._journal.poll()
        total = len(self._confirmed)
        evicted = 0
        lost: list[int] = []
        for hash_id in absent:
            position = self._confirmed.pop(hash_id)
            key = long_key(self._namespace, hash_id)
            if self._journal.evicted.get(key, -1) > position:
                evicted += 1
            else:
                lost.append(hash_id)
        return Verdict(total, total - evicted - len(lost), evicted, lost)

    def close(self) -> None:
        """Close the journal."""
        self._journal.close()
