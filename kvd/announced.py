"""Block sizes that clients announce, and the size classes they get."""

from __future__ import annotations

import logging

from kvd.size_classes import MAX_CLASSES, SizeClasses
from tablespace import format_size

logger = logging.getLogger(__name__)

MAX_NOTED = 8  # Sizes that get a note of their own in STATS; the log has all.


class Announced:
    """Makes size classes for what clients announce, and says what came of it, once a size.

    Parameters
    ----------
    classes : SizeClasses
        Of the arena.
    notes : list of str
        Where it is said, for STATS.
    """

    def __init__(self, classes: SizeClasses, notes: list[str]) -> None:
        self._classes = classes
        self._notes = notes
        self._said: dict[int, str] = {}

    def note(self, client: str, block_bytes: int) -> int:
        """Return the size of the slots that serve such blocks, or of the largest there are."""
        before = self._classes.sizes
        chosen = self._classes.add(block_bytes)
        who = client or "a client"
        if chosen is None:
            largest = self._classes.largest_bytes
            self._say(
                block_bytes,
                f"{who} announces blocks of {format_size(block_bytes)}, the largest slots in "
                f"memory have {format_size(largest)}: blocks that do not fit are not stored; "
                "raise --tablespace-slot-bytes or --max-bytes",
            )
            return largest
        if chosen.slot_bytes not in before:
            logger.info(
                "memory has slots of %s from now on, for blocks of %s",
                format_size(chosen.slot_bytes),
                who,
            )
        elif chosen.slot_bytes != self._classes.size_for(block_bytes):
            self._say(
                block_bytes,
                f"{who} announces blocks of {format_size(block_bytes)}; memory has {MAX_CLASSES} "
                f"size classes already, so they take slots of {format_size(chosen.slot_bytes)}",
            )
        return chosen.slot_bytes

    def note_too_large_for_disk(self, client: str, block_bytes: int, slot_bytes: int) -> None:
        """Say that blocks of a size stay in memory."""
        self._say(
            block_bytes,
            f"{client or 'a client'} announces blocks of {format_size(block_bytes)}, the largest "
            f"slots on disk have {format_size(slot_bytes)}: larger blocks stay in memory only; "
            "--tablespace-slot-bytes auto adds what is announced",
        )

    def _say(self, block_bytes: int, sentence: str) -> None:
        if self._said.get(block_bytes) == sentence:
            return
        if block_bytes in self._said:
            self._notes.remove(self._said.pop(block_bytes))
        logger.warning("%s", sentence)
        if len(self._said) < MAX_NOTED:
            self._said[block_bytes] = sentence
            self._notes.append(sentence)
