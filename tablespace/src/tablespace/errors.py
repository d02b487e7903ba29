"""Every error tablespace raises on its own account. OS failures stay OSError."""

from __future__ import annotations

from typing import Any


class TablespaceError(Exception):
    """Base of all errors of this package."""


class ValueTooLargeError(TablespaceError, ValueError):
    """A value does not fit the largest slot; slots are not chained.

    Attributes
    ----------
    key : bytes
        Whose value it is.
    value_bytes, slot_bytes : int
        With `more`, that of the value is what was read of it.
    """

    def __init__(
        self, key: bytes, value_bytes: int, slot_bytes: int, *, more: bool = False
    ) -> None:
        super().__init__(
            f"value of {'more than ' if more else ''}{value_bytes} bytes of key hex:{key.hex()} "
            f"is larger than the largest slot of {slot_bytes} bytes. Remedy: a region with larger "
            "slots (slot_bytes)"
        )
        self.key = key
        self.value_bytes = value_bytes
        self.slot_bytes = slot_bytes


class FullError(TablespaceError):
    """No free slot and nothing may be evicted, or the disk has no space for the journal."""


class BusyError(TablespaceError):
    """Another process (or another handle in this one) holds the region's writer lock.

    Attributes
    ----------
    holder : dict
        host, boot_id, pid, start_time of the holder, as far as known.
    """

    def __init__(self, path: str, holder: dict[str, Any]) -> None:
        known = ", ".join(
            f"{name} {holder[name]}"
            for name in ("host", "pid", "start_time", "boot_id")
            if name in holder
        )
        super().__init__(
            f"region {path} is open for writing by {known or 'an unknown holder'}. "
            f"Remedy: stop that process, or open another region"
        )
        self.path = path
        self.holder = holder


class ReadOnlyError(TablespaceError):
    """A store opened with read_only=True was asked to change the region."""

    def __init__(self, call: str, path: str) -> None:
        super().__init__(
            f"{call}: the region {path} was opened with read_only=True. Remedy: ask the process "
            "that has it open for writing, or open it without read_only where there is none"
        )


class FailedError(TablespaceError):
    """An earlier failed sync made the store read-only; reopen it to go on.

    The first error is the ``__cause__``.
    """


class CorruptionError(TablespaceError):
    """A file of the region holds what no crash can leave behind.

    Attributes
    ----------
    path : str
    offset_bytes : int
    expected, found : str
    """

    def __init__(self, path: str, offset_bytes: int, expected: str, found: str) -> None:
        super().__init__(
            f"{path}: damaged at byte {offset_bytes}: expected {expected}, found {found}. "
            f"Remedy: open with recover='salvage' to keep what is sound, or recover='empty'"
        )
        self.path = path
        self.offset_bytes = offset_bytes
        self.expected = expected
        self.found = found


class MissingCodecError(TablespaceError, ImportError):
    """A value is compressed, or is to be, and the package that does it is not installed."""


class GeometryError(TablespaceError, ValueError):
    """The region has, or was asked to have, a shape that cannot be."""


class FormatVersionError(TablespaceError):
    """The region was written by another format version than this package reads."""


class ClosedError(TablespaceError, ValueError):
    """The store is closed, or belongs to the parent of a forked process."""


def is_of_the_engine(error: BaseException) -> bool:
    """Tell an error of a commit from one that a signal's handler raised on the way.

    The engine's OSErrors name the file or the block; a handler's name nothing.
    """
    if isinstance(error, OSError):
        return error.filename is not None
    return isinstance(error, (TablespaceError, MemoryError))
