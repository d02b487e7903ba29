"""Which file system a path is on: mountinfo (proc(5)), else statfs(2). Never raises."""

from __future__ import annotations

import ctypes
import os
import re
from dataclasses import dataclass, field

from tablespace.io.system_files import SystemFiles, device_number, nearest_existing

# statfs(2), f_type of the file systems that matter here.
_MAGIC = {
    0xEF53: "ext4",
    0x58465342: "xfs",
    0x9123683E: "btrfs",
    0x2FC12FC1: "zfs",
    0x01021994: "tmpfs",
    0x858458F6: "ramfs",
    0x794C7630: "overlay",
    0x6969: "nfs",
    0xFF534D42: "cifs",
    0xFE534D42: "smb2",
    0x01021997: "9p",
    0x65735546: "fuse",
    0x00C36400: "ceph",
    0x0BD00BD0: "lustre",
    0x47504653: "gpfs",
    0x19830326: "beegfs",
}
_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """The mount a path is on.

    Attributes
    ----------
    number : str
        Device "major:minor"; the major is 0 where no block device is below.
    mount_point, file_system, source : str
        Empty where unknown.
    options : dict
        Mount and super block options; the value is empty for those without one.
    """

    number: str = ""
    mount_point: str = ""
    file_system: str = ""
    source: str = ""
    options: dict[str, str] = field(default_factory=dict)


def mount_of(path: str, files: SystemFiles) -> Mount:
    """Find the mount of a path, or of its nearest ancestor that exists.

    Among the mounts whose directory contains the path, those with the path's own device number
    come first, then the deepest, then the latest. A number alone does not do: btrfs and overlay
    give files other numbers than their mount has.
    """
    at = nearest_existing(path)
    number = device_number(at)
    best: tuple[bool, int] = (False, -1)
    found: Mount | None = None
    for line in files.text(f"{files.proc_root}/self/mountinfo").splitlines():
        mount = _parse(line)
        if mount is None or not _contains(mount.mount_point, at):
            continue
        rank = (mount.number == number, len(mount.mount_point))
        if rank >= best:
            best, found = rank, mount
    return found or Mount(number=number, file_system=_by_magic(at))


def file_system_of(path: str) -> str:
    """Return the type of the file system a path is on; empty where unknown."""
    return mount_of(path, SystemFiles()).file_system


def _parse(line: str) -> Mount | None:
    before, dash, after = line.partition(" - ")
    head, tail = before.split(" "), after.split(" ")
    if not dash or len(head) < 6 or len(tail) < 2:
        return None
    options = {}
    for text in (head[5], tail[2] if len(tail) > 2 else ""):
        for option in text.split(","):
            name, _, value = option.partition("=")
            if name:
                options[name] = _unescape(value)
    return Mount(head[2], _unescape(head[4]), tail[0], _unescape(tail[1]), options)


def _unescape(text: str) -> str:
    """Undo mountinfo's octal escapes of blanks, line ends and backslashes."""
    return _OCTAL.sub(lambda digits: chr(int(digits[1], 8)), text)


def _contains(mount_point: str, path: str) -> bool:
    return mount_point.startswith("/") and (
        path == mount_point or path.startswith(mount_point.rstrip("/") + "/")
    )


def _by_magic(path: str) -> str:
    """Return the type by statfs(2), whose first member is a long on Linux."""
    memory = (ctypes.c_long * 64)()
    try:
        code = ctypes.CDLL(None).statfs(os.fsencode(path), memory)
    except (OSError, AttributeError, ValueError):
        return ""
    return _MAGIC.get(memory[0] & 0xFFFFFFFF, "") if code == 0 else ""
