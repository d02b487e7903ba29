"""The layout of the arena's memfds, as both the daemon and its clients see it.

The index begins with a header page; the slot records and the table of `tablespace.shared`
follow. All numbers are little-endian.

    offset  size  field
    0       8     magic
    8       4     layout version
    12      4     slot numbers
    16      8     bytes of a slab
    24      8     offset of the first slot record
    32      8     bytes of the data memfd
    40      16    arena uuid
    56      8     heartbeat, CLOCK_MONOTONIC in nanoseconds; 0 once the daemon stops
    64      8     offset of the table
    72      8     entries of the table
    80      8     slot numbers of a slab

Where a slot lies in the data says its record: slots of several sizes share the numbers.
A lane (one memfd a session) holds leases and touches; HELLO_ACK says how many of each.
"""

import fcntl
import struct

from tablespace.shared import KEYED_RECORD_BYTES, MAX_LEASES, Lane, SequencedSlots, SlotIndex

from kvd.slab_geometry import PAGE_BYTES

MAGIC = b"kvdindex"
LAYOUT_VERSION = 3
HEADER = struct.Struct("<8sIIQQQ16s8xQQQ")
HEARTBEAT_OFFSET = 56
RECORDS_OFFSET = 4096
LEASE_SHARE = 4  # One session may lease a quarter of the slots, so that it starves nobody.
LANE_TOUCHES = 4096  # Half a second of 8,000 hits a second; older ones are overwritten.

# fcntl(2). Python names F_SEAL_FUTURE_WRITE only from 3.13 on.
F_SEAL_FUTURE_WRITE = 0x0010
DATA_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
INDEX_SEALS = DATA_SEALS | F_SEAL_FUTURE_WRITE
# What either side insists on before it maps: without these the other could shrink the file
# under it, and every access would be a SIGBUS.
REQUIRED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def table_offset(slot_count: int) -> int:
    """Return where the table lies in the index: behind the records, on a page of its own."""
    return _whole_pages(RECORDS_OFFSET + SequencedSlots.bytes_for(slot_count, KEYED_RECORD_BYTES))


def index_bytes(slot_count: int) -> int:
    """Return the size of the index memfd, in whole pages."""
    return _whole_pages(table_offset(slot_count) + 8 * SlotIndex.entries_for(slot_count))


def lane_leases(slot_count: int) -> int:
    """Return how many leases a session's lane holds."""
    return max(1, min(MAX_LEASES, slot_count // LEASE_SHARE))


def lane_bytes(leases: int, touches: int) -> int:
    """Return the size of a lane's memfd, in whole pages."""
    return _whole_pages(Lane.bytes_for(leases, touches))


def _whole_pages(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
