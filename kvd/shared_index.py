"""The slots' records and the table from key to slot, over one mapping of the index memfd."""

from __future__ import annotations

import mmap

from tablespace.shared import KEYED_RECORD_BYTES, SequencedSlots, SlotIndex

from kvd.arena_layout import RECORDS_OFFSET, table_offset


def open_index(mapping: mmap.mmap, slot_count: int, *, writable: bool = False) -> SlotIndex:
    """Return the index over a mapping; its records are `.slots`."""
    records = SequencedSlots(
        mapping,
        slot_count,
        offset=RECORDS_OFFSET,
        writable=writable,
        record_bytes=KEYED_RECORD_BYTES,
    )
    return SlotIndex(
        records,
        mapping,
        offset=table_offset(slot_count),
        entries=SlotIndex.entries_for(slot_count),
    )
