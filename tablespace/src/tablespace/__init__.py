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
from tablespace.check import Report, check
from tablespace.errors import (
    BusyError,
    ClosedError,
    CorruptionError,
    FailedError,
    FormatVersionError,
    FullError,
    GeometryError,
    MissingCodecError,
    ReadOnlyError,
    TablespaceError,
    ValueTooLargeError,
)
from tablespace.eviction import BatchEvictionPolicy, EvictionPolicy
from tablespace.follower import Follower
from tablespace.io.classify import Classification, classify
from tablespace.layout import format_size, parse_size
from tablespace.opening import open_store as open
from tablespace.recovery_report import Damage, RecoveryReport
from tablespace.stats import Entry, FollowerStats, PoolStats, Scrubbed, StoreStats
from tablespace.store import Store
from tablespace.verification import DamagedValue

__version__ = "0.1.0"

__all__ = [
    "AlignedBuffer",
    "BatchEvictionPolicy",
    "BusyError",
    "Classification",
    "ClosedError",
    "CorruptionError",
    "Damage",
    "DamagedValue",
    "Entry",
    "EvictionPolicy",
    "FailedError",
    "Follower",
    "FollowerStats",
    "FormatVersionError",
    "FullError",
    "GeometryError",
    "MissingCodecError",
    "PoolStats",
    "ReadOnlyError",
    "RecoveryReport",
    "Report",
    "Scrubbed",
    "Store",
    "StoreStats",
    "TablespaceError",
    "ValueTooLargeError",
    "check",
    "checksum64",
    "classify",
    "format_size",
    "key_hash",
    "open",
    "parse_size",
]
