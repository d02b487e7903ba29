"""The free-space floor: what a region leaves of its file system for others."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

from tablespace import format_size

CHECK_S = 1.0


class BelowFloorError(OSError):
    """The file system has less free than the floor; nothing is written there."""

    def __init__(self, directory: Path, free_bytes: int, needed_bytes: int, floor: int) -> None:
        wanted = f" and {format_size(needed_bytes)} more are needed" if needed_bytes else ""
        super().__init__(
            errno.ENOSPC,
            f"{format_size(free_bytes)} are free there{wanted}; --free-floor keeps "
            f"{format_size(floor)}",
            str(directory),
        )


class FreeSpace:
    """How much is free where a path is.

    statvfs of the directory itself, not of the mount: ext4 and xfs answer for a directory under
    a project quota with what the quota leaves.

    Parameters
    ----------
    directory : Path
    floor_bytes : int
        0 for none.
    """

    def __init__(self, directory: Path, floor_bytes: int) -> None:
        self._directory = directory
        self._floor_bytes = floor_bytes
        self._looked_at = -CHECK_S
        self.free_bytes = 0

    def look(self) -> int:
        """Return the bytes free for us. Disk call."""
        found = os.statvfs(_existing(self._directory))
        self.free_bytes = found.f_bavail * found.f_frsize
        self._looked_at = time.monotonic()
        return self.free_bytes

    def check(self) -> None:
        """Raise BelowFloorError when less is free than the floor; looks once a second."""
        if not self._floor_bytes:
            return
        if time.monotonic() - self._looked_at >= CHECK_S:
            self.look()
        if self.free_bytes < self._floor_bytes:
            raise BelowFloorError(self._directory, self.free_bytes, 0, self._floor_bytes)

    def missing_for(self, needed_bytes: int) -> int:
        """Return how many bytes too few are free for so many more above the floor."""
        return max(0, needed_bytes) + self._floor_bytes - self.look()

    def check_growth(self, needed_bytes: int) -> None:
        """Raise BelowFloorError when making containers would leave less than the floor."""
        if not self._floor_bytes or needed_bytes <= 0:
            return
        if self.look() - needed_bytes < self._floor_bytes:
            raise BelowFloorError(
                self._directory, self.free_bytes, needed_bytes, self._floor_bytes
            )


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
