"""Finds out how much memory and disk a scratch daemon could have here."""

from __future__ import annotations

import os
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
MOUNTINFO = Path("/proc/self/mountinfo")
CGROUP = Path("/proc/self/cgroup")
CGROUP_ROOT = Path("/sys/fs/cgroup")


def available_memory_bytes() -> int | None:
    """Return what can still be allocated: the machine's, or the cgroup's rest if that is less.

    None where the machine does not say.
    """
    found = [_machine_bytes(), _cgroup_bytes()]
    return min((number for number in found if number is not None), default=None)


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


def _machine_bytes() -> int | None:
    try:
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    except OSError:
        pass
    return None


def _cgroup_bytes() -> int | None:
    """Return the smallest rest up the tree of a version 2 cgroup, page cache not counted."""
    try:
        lines = CGROUP.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if not line.startswith("0::"):
            continue
        here = CGROUP_ROOT / line[3:].lstrip("/")
        rests = [_rest_of(level) for level in (here, *here.parents) if level != Path("/")]
        return min((rest for rest in rests if rest is not None), default=None)
    return None


def _rest_of(level: Path) -> int | None:
    try:
        limit = (level / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((level / "memory.current").read_text())
        for line in (level / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name == "inactive_file":
                used -= int(value)
    except (OSError, ValueError):
        return None
    return max(0, int(limit) - used)
