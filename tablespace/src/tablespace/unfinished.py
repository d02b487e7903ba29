"""What a creation that was cut short leaves: files of a region, and no region."""

from __future__ import annotations

import errno

from tablespace.io.directory import Directory
from tablespace.journal import JOURNAL_BACKUP_NAME, JOURNAL_NAME
from tablespace.region import HOLDER_OFFSET, REGION_NAME
from tablespace.snapshot import SNAPSHOT_BACKUP_NAME, SNAPSHOT_NAME


def holds_records(directory: Directory) -> bool:
    """Say whether a directory without a sound region.json was ever a region in use."""
    for name in (JOURNAL_NAME, JOURNAL_BACKUP_NAME, SNAPSHOT_NAME, SNAPSHOT_BACKUP_NAME):
        if not directory.exists(name):
            continue
        device = directory.open(name)
        try:
            head = device.read_at(0, min(device.size_bytes, 1 << 16))
        finally:
            device.close()
        # The files of a region in the making: a header alone, or header and end of no entries.
        lines = [line for line in head.split(b"\n") if line]
        if name in (JOURNAL_NAME, JOURNAL_BACKUP_NAME) and len(lines) > 1:
            return True
        if name in (SNAPSHOT_NAME, SNAPSHOT_BACKUP_NAME) and b'"count":0,' not in head:
            return True
    return False


def is_cut_short(directory: Directory) -> bool:
    """Say whether region.json is there, was never written as a whole, and nothing was stored."""
    try:
        device = directory.open(REGION_NAME, read_only=True)
    except FileNotFoundError:
        return False
    try:
        data = device.read_at(0, min(device.size_bytes, HOLDER_OFFSET))
    finally:
        device.close()
    return is_unwritten(data) and not holds_records(directory)


def is_unwritten(identity: bytes) -> bool:
    """Tell what a creation leaves of region.json's first line from damage: the line has no NUL."""
    return not identity or b"\0" in identity


def cut_short(directory: Directory) -> FileNotFoundError:
    """Return the error of a directory in which there is no more of a region than that."""
    return FileNotFoundError(
        errno.ENOENT,
        "no region here yet: making one was cut short, or is under way; nothing is stored in it. "
        "Remedy: make it again (tablespace.open, or 'python -m tablespace put --create SIZE'), "
        "or, where nobody is making it, remove the directory",
        directory.path,
    )
