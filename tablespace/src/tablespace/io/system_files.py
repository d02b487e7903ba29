"""What the kernel says of devices and mounts, under roots that tests replace. Never raises."""

from __future__ import annotations

import os

# A sysfs attribute is at most a page; mountinfo on hosts of many containers is some 100 KiB.
MAX_TEXT_BYTES = 4 << 20
# Entries of one directory that are looked at; /sys/class/block of large hosts has some thousands.
MAX_NAMES = 1 << 14


class SystemFiles:
    """sysfs and procfs, or directories that look like them.

    Parameters
    ----------
    sys_root, proc_root : str
        Where they are mounted.

    Notes
    -----
    Whatever cannot be read is absent: an empty text, an empty list.
    """

    def __init__(self, sys_root: str = "/sys", proc_root: str = "/proc") -> None:
        self.sys_root = sys_root
        self.proc_root = proc_root

    def text(self, path: str) -> str:
        """Return a file's text without blanks around it."""
        try:
            # Not blocking: what should be a file may be anything.
            descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (OSError, ValueError):
            return ""
        pieces = []
        left = MAX_TEXT_BYTES
        try:
            while left > 0 and (piece := os.read(descriptor, min(left, 1 << 16))):
                pieces.append(piece)
                left -= len(piece)
        except OSError:
            pass
        finally:
            os.close(descriptor)
        return b"".join(pieces).decode("utf-8", "surrogateescape").strip()

    def names(self, path: str) -> list[str]:
        """Return the names in a directory, sorted."""
        try:
            return sorted(os.listdir(path))[:MAX_NAMES]
        except (OSError, ValueError):
            return []

    def exists(self, path: str) -> bool:
        """Say whether something is there."""
        try:
            return os.path.exists(path)
        except (OSError, ValueError):
            return False

    def real(self, path: str) -> str:
        """Return a path without symbolic links; itself where they lead nowhere."""
        try:
            return os.path.realpath(path)
        except (OSError, ValueError):
            return path


def nearest_existing(path: str) -> str:
    """Return a path without links, or its nearest ancestor that is there."""
    try:
        at = os.path.realpath(path)
        while not os.path.lexists(at) and os.path.dirname(at) != at:
            at = os.path.dirname(at)
    except (OSError, ValueError):
        return "/"
    return at


def device_number(path: str) -> str:
    """Return "major:minor" of the file system a path is on; empty where unknown."""
    try:
        number = os.stat(path).st_dev
    except (OSError, ValueError):
        return ""
    return f"{os.major(number)}:{os.minor(number)}"
