"""The layout of the arena's memfds, as both the daemon and its clients see it.

The index begins with a header page; the slot records of `tablespace.shared` follow. All
numbers are little-endian.

    offset  size  field
    0       8     magic
    8       4     layout version
    12      4     slot count
    16      8     slot bytes
    24      8     offset of the first slot record
    32      8     bytes of the data memfd
    40      16    arena uuid
    56      8     heartbeat, CLOCK_MONOTONIC in nanoseconds
"""

import fcntl
import struct

from tablespace.shared import SequencedSlots

MAGIC = b"kvdindex"
LAYOUT_VERSION = 1
HEADER = struct.Struct("<8sIIQQQ16s")
HEARTBEAT_OFFSET = 56
RECORDS_OFFSET = 4096
PAGE_BYTES = 4096

# fcntl(2). Python names F_SEAL_FUTURE_WRITE only from 3.13 on.
F_SEAL_FUTURE_WRITE = 0x0010
DATA_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
INDEX_SEALS = DATA_SEALS | F_SEAL_FUTURE_WRITE
# What a client insists on before it maps: without these the daemon's side could shrink the
# file under it, and every access would be a SIGBUS.
REQUIRED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


def index_bytes(slot_count: int) -> int:
    """Return the size of the index memfd, in whole pages."""
    size = RECORDS_OFFSET + SequencedSlots.bytes_for(slot_count)
    return -(-size // PAGE_BYTES) * PAGE_BYTES
