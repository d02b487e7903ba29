"""Whether a directory's storage can be read and written by a GPU directly."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import msgspec

from tablespace import classify

PAGE = 4096
# Local file systems that both libraries know; the parallel ones are cuFile's alone.
LOCAL = ("ext4", "xfs")
PARALLEL = ("weka", "parallel")


class GpuRoot(msgspec.Struct, kw_only=True):
    """One directory.

    Attributes
    ----------
    path, file_system, device_class : str
        As `kvd classify` says.
    direct : str
        Whether O_DIRECT works there: "yes", or why not.
    missing : list of str
        What keeps a GPU from reading it directly, each with a remedy.
    notes : list of str
    """

    path: str
    file_system: str = ""
    device_class: str = ""
    direct: str = ""
    missing: list[str] = []
    notes: list[str] = []


def look_at_root(path: Path) -> GpuRoot:
    """Return what a directory is on, and what is against it; leaves nothing behind."""
    if not path.is_dir():
        text = f"{path} is no directory. Remedy: make it, for this user alone"
        return GpuRoot(path=str(path), missing=[text])
    found = classify(str(path))
    root = GpuRoot(path=str(path), file_system=found.file_system, device_class=found.device_class)
    root.direct = _try_direct(path)
    if root.direct != "yes":
        root.missing.append(
            f"O_DIRECT does not work in {path}: {root.direct}. Remedy: a directory on ext4 or xfs"
        )
    if root.device_class in PARALLEL:
        root.notes.append(f"{root.file_system}: cuFile knows it where its own driver does")
    elif root.file_system not in LOCAL:
        root.missing.append(
            f"{path} is on {root.file_system or 'an unknown file system'}. Remedy: ext4 or xfs on "
            "a local NVMe disk"
        )
    elif root.device_class != "nvme":
        why = "; ".join(found.reasons[:1])
        root.missing.append(
            f"{path} is on {root.device_class}, not NVMe ({why}). Remedy: a local NVMe disk, "
            "without RAID by mdadm, encryption or loop devices between"
        )
    options = _mount_options(found.mount_point)
    if root.file_system == "ext4" and (bad := options & {"data=journal", "data=writeback"}):
        root.missing.append(
            f"{found.mount_point} is mounted with {bad.pop()}. Remedy: data=ordered, the default"
        )
    layers = [each.name for each in found.chain if each.name.startswith(("dm-", "md", "loop"))]
    if layers and root.device_class == "nvme":
        root.notes.append(
            f"between it and the disk is {', '.join(layers)}: LVM on NVMe is known to work with "
            "newer versions of hipFile, mdadm, encryption and loop devices are not"
        )
    return root


def _try_direct(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        return str(error.strerror)
    try:
        page = mmap.mmap(-1, PAGE)
        return "yes" if os.pwrite(fd, page, 0) == PAGE else "a write in part"
    except OSError as error:
        return str(error.strerror)
    finally:
        os.close(fd)


def _mount_options(mount_point: str) -> set[str]:
    """Return the options of the last mount at a place."""
    found: set[str] = set()
    try:
        lines = Path("/proc/self/mounts").read_text().splitlines()
    except OSError:
        return found
    for line in lines:
        words = line.split()
        if len(words) > 3 and words[1] == mount_point:
            found = set(words[3].split(","))
    return found
