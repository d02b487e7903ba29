"""Shared-memory primitives: slots that one process writes and any number of others read.

Everything here works on memory that another process may be changing at the same time (a memfd
mapped by both): sequenced slots, an index from key to slot beside them, lanes by which a reader
leases slots, and a client's reader over all three.
"""

from tablespace.shared.arena_reader import MISS, ArenaReader, are_keys
from tablespace.shared.copies import checksum_many, copy_in, load_u64, store_u64
from tablespace.shared.lane import MAX_LEASES, MAX_TOUCHES, Lane, drain_lanes
from tablespace.shared.packed_keys import contains_packed
from tablespace.shared.sequenced_slots import RECORD_BYTES, TORN, SequencedSlots
from tablespace.shared.slot_index import KEYED_RECORD_BYTES, MAX_PROBES, SlotIndex

__all__ = [
    "KEYED_RECORD_BYTES",
    "MAX_LEASES",
    "MAX_PROBES",
    "MAX_TOUCHES",
    "MISS",
    "RECORD_BYTES",
    "TORN",
    "ArenaReader",
    "Lane",
    "SequencedSlots",
    "SlotIndex",
    "are_keys",
    "checksum_many",
    "contains_packed",
    "copy_in",
    "drain_lanes",
    "load_u64",
    "store_u64",
]
