"""Finds out how much disk a scratch daemon could have here, and whether that is memory."""

from __future__ import annotations

import os
from pathlib import Path

MOUNTINFO = Path("/proc/self/mountinfo")


def free_disk_bytes(directory: Path) -> int:
    """Return what an unprivileged process may still write on the directory's file system."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def is_memory_backed(directory: Path) -> bool:
    """Tell whether the directory's file system keeps its files in memory."""
    device = os.stat(directory).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = MOUNTINFO.read_text().splitlines()
    except OSError:
        return False
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == wanted:
            return after.split()[0] in ("tmpfs", "ramfs")
    return False
