"""Slots of values that failed: tested before they are used again, or taken out of use.

A value fails, its entry is dropped, and its slot is in limbo.  When the `drop` record is durable
and nobody reads there any more, the thread that leads a commit writes over the slot and reads it
back.  A slot that passes is free at once.  One that fails stays in limbo until its `quarantine`
record, which rides in the next append, is durable.
"""

from __future__ import annotations

import logging
import os

from tablespace._core.key_index import KeyIndex
from tablespace._core.line_codec import LineWriter
from tablespace.io.device import Device
from tablespace.io.slot_test import Verdict, try_slot

logger = logging.getLogger("tablespace")

# A test is a write, a sync and a read: so many are what a commit may be delayed by.
TESTS_PER_COMMIT = 2
# Tests between two commits when a caller waits for all of them.
TESTS_PER_TURN = 64
# Commits without a test after one that gave no answer, since the next one hardly will.
PAUSE_COMMITS = 64


class Quarantine:
    """Tests suspects and keeps the records of those that failed.

    Notes
    -----
    Only the thread that leads a commit calls this, and only while no write to a container waits
    for its sync: so an error of a test's own sync concerns nobody else's data.
    """

    def __init__(self, index: KeyIndex, devices: list[Device]) -> None:
        self._index = index
        self._devices = devices
        self._pause = 0
        # Slots whose records are in the group under way.
        self._encoded: list[tuple[int, int]] = []

    def try_some(self, seq: int) -> None:
        """Test a few suspects ahead of a commit.

        Parameters
        ----------
        seq : int
            Number of the last record; another one whenever a slot becomes a suspect again.
        """
        if not self._index.suspect_count:
            return
        if self._pause:
            self._pause -= 1
            return
        self.try_suspects(seq, TESTS_PER_COMMIT)

    def try_suspects(self, seq: int, limit: int) -> int:
        """Test up to `limit` suspects that may be written over now; return how many passed."""
        index = self._index
        passed = 0
        for container, slot in index.testable_suspects(limit):
            verdict = self.try_one(container, slot, seq)
            if verdict is Verdict.GOOD:
                index.acquit(container, slot)
                passed += 1
            elif verdict is Verdict.BAD:
                index.convict(container, slot)
            else:
                index.postpone(container, slot)
                self._pause = PAUSE_COMMITS
        return passed

    def try_one(self, container: int, slot: int, seq: int) -> Verdict:
        """Write over a slot and read it back; say in the log what came of it."""
        slot_bytes = self._index.allocator.slot_bytes_of_container(container)
        device = self._devices[container]
        verdict, code = try_slot(device, slot * slot_bytes, slot_bytes, seq)
        level = logging.INFO if verdict is Verdict.GOOD else logging.WARNING
        said = {
            Verdict.GOOD: "passed its test and is used again",
            Verdict.BAD: "failed its test and is out of use. Remedy: replace the disk, or run "
            "tablespace.check(path, repair=True), which tests it again",
            Verdict.UNKNOWN: "could not be tested; it rests",
        }[verdict]
        problem = f" ({os.strerror(-code)})" if code else ""
        logger.log(level, "%s: slot %d %s%s", device.path, slot, said, problem)
        return verdict

    def encode(self, writer: LineWriter, seq: int, group: int) -> int:
        """Add the records of the slots that failed; return the next sequence number."""
        self._encoded = self._index.convicted() if self._index.suspect_count else []
        for at, (container, slot) in enumerate(self._encoded):
            writer.quarantine(seq + at, group, container, slot)
        return seq + len(self._encoded)

    def settle(self) -> None:
        """The records that `encode` added last are durable: their slots are out of use."""
        for container, slot in self._encoded:
            self._index.condemn(container, slot)
        self._encoded = []
