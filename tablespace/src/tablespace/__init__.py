"""tablespace: an embedded block store.

A region is a fixed set of pre-allocated container files carved into slots, a JSON journal and
atomic snapshots.  A put is durable when it returns; a crash never surfaces half a value.

>>> import tablespace
>>> with tablespace.open("/tmp/region", max_bytes="64M") as store:  # doctest: +SKIP
...     store.put(b"key", b"value")
...     store.get(b"key")
b'value'
"""

try:
    from tablespace._core.aligned_buffer import AlignedBuffer
except ImportError as _error:
    raise ImportError(
        f"tablespace's compiled modules cannot be loaded ({_error}). Remedy: install a build for "
        "this Python and machine (pip install --force-reinstall tablespace)"
    ) from _error
from tablespace._core.checksum import checksum64, key_hash
from tablespace.errors import (
    BusyError,
    ClosedError,
    CorruptionError,
    FailedError,
    FormatVersionError,
    FullError,
    GeometryError,
    TablespaceError,
    ValueTooLargeError,
)
from tablespace.layout import format_size, parse_size
from tablespace.opening import open_store as open
from tablespace.recovery import RecoveryReport
from tablespace.stats import Entry, PoolStats, StoreStats
from tablespace.store import Store

__version__ = "0.1.0"

__all__ = [
    "AlignedBuffer",
    "BusyError",
    "ClosedError",
    "CorruptionError",
    "Entry",
    "FailedError",
    "FormatVersionError",
    "FullError",
    "GeometryError",
    "PoolStats",
    "RecoveryReport",
    "Store",
    "StoreStats",
    "TablespaceError",
    "ValueTooLargeError",
    "checksum64",
    "format_size",
    "key_hash",
    "open",
    "parse_size",
]
