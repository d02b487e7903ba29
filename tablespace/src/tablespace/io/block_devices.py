"""What kind of disk is below a block device, through partitions, LVM, md, dm and loops.

Never raises: what sysfs does not tell is of class "unknown".
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tablespace.io.system_files import SystemFiles

# More devices below one file system, or deeper stacks, are not looked at.
MAX_DEVICES = 256
MAX_DEPTH = 32

_VIRTIO = re.compile(r"virtio\d+")
_USB = re.compile(r"usb\d+")
_ISCSI = re.compile(r"session\d+")
_FIBRE = re.compile(r"rport-[\d:-]+")
_SAS = re.compile(r"(?:end_device|expander)-[\d:]+")
_ATA = re.compile(r"ata\d+")
_NVME = re.compile(r"nvme(?:\d+|-subsys\d+)")


@dataclass(frozen=True)
class Layer:
    """One thing that a path's bytes go through.

    Attributes
    ----------
    name : str
        The kernel's name of a device ("dm-0", "nvme0n1p2"), or a file system's source.
    device_class : str
        Empty for what only stands on others.
    why : str
        What says so.
    """

    name: str
    device_class: str
    why: str


FileClassifier = Callable[[str], list[Layer]]


class BlockDeviceWalk:
    """Collects the layers below block devices, each device once.

    Parameters
    ----------
    files : SystemFiles
    of_file : callable
        Gives the layers below a regular file; for loop devices.
    """

    def __init__(self, files: SystemFiles, of_file: FileClassifier) -> None:
        self.layers: list[Layer] = []
        self._files = files
        self._of_file = of_file
        self._seen: set[str] = set()

    def add_number(self, number: str) -> None:
        """Add the device "major:minor" and what is below it."""
        self._add(f"{self._files.sys_root}/dev/block/{number}", number, 0)

    def add_source(self, source: str) -> None:
        """Add the device that a mount names, such as /dev/sda1 or /dev/mapper/vg-lv."""
        for name in self._names_of(source):
            self._add(f"{self._files.sys_root}/class/block/{name}", name, 0)

    def _names_of(self, source: str) -> list[str]:
        """Return the kernel's names of a mount's source; more for a btrfs of several devices."""
        name = source.rsplit("/", 1)[-1]
        folder = f"{self._files.sys_root}/class/block"
        if not self._files.exists(f"{folder}/{name}"):
            group = source.removeprefix("/dev/").rpartition("/")[0]
            wanted = {name, f"{group.replace('-', '--')}-{name.replace('-', '--')}"}
            for each in self._files.names(folder):
                if self._files.text(f"{folder}/{each}/dm/name") in wanted:
                    name = each
                    break
        volumes = f"{self._files.sys_root}/fs/btrfs"
        for volume in self._files.names(volumes):
            members = self._files.names(f"{volumes}/{volume}/devices")
            if name in members:
                return members
        return [name]

    def _add(self, link: str, name: str, depth: int) -> None:
        files = self._files
        node = files.real(link)
        if node in self._seen:
            return
        self._seen.add(node)
        if len(self._seen) > MAX_DEVICES or depth > MAX_DEPTH:
            self._note(name, "unknown", "too many devices below one another")
            return
        if not files.exists(node):
            self._note(name, "unknown", "sysfs has no entry for it")
            return
        name = node.rsplit("/", 1)[-1]
        if files.exists(f"{node}/partition"):
            disk = node.rsplit("/", 1)[0]
            self._note(name, "", f"a partition of {disk.rsplit('/', 1)[-1]}")
            self._add(disk, disk, depth + 1)
            return
        below = files.names(f"{node}/slaves")
        if below:
            self._note(name, "", f"{_kind_of_stack(files, node, name)} on {', '.join(below)}")
            for each in below:
                self._add(f"{node}/slaves/{each}", each, depth + 1)
            return
        backing = files.text(f"{node}/loop/backing_file")
        if backing:
            self._note(name, "", f"a loop device on {backing}")
            self.layers += self._of_file(backing.removesuffix(" (deleted)"))
            return
        self._note(name, *classify_disk(files, node, name))

    def _note(self, name: str, device_class: str, why: str) -> None:
        self.layers.append(Layer(name, device_class, why))


def _kind_of_stack(files: SystemFiles, node: str, name: str) -> str:
    uuid = files.text(f"{node}/dm/uuid")
    for begin, kind in (
        ("LVM-", "a logical volume (LVM)"),
        ("CRYPT-", "an encrypted volume (dm-crypt)"),
        ("mpath-", "a multipath map"),
    ):
        if uuid.startswith(begin) or f"-{begin}" in uuid:
            return kind
    if uuid or name.startswith("dm-"):
        return "a device-mapper volume"
    level = files.text(f"{node}/md/level")
    if level or re.fullmatch(r"md\d+|md_.*", name):
        return f"an md array ({level[:32] or 'unknown level'})"
    return "a device that stands"


def classify_disk(files: SystemFiles, node: str, name: str) -> tuple[str, str]:
    """Return (class, why) of a disk by the path of its node in sysfs and its attributes."""
    parts = node.removeprefix(files.real(files.sys_root)).split("/")

    def on(pattern: re.Pattern[str]) -> bool:
        return any(pattern.fullmatch(part) for part in parts)

    # The order matters: what carries the disk says more than what the disk calls itself.
    if on(_USB):
        return "usb", "behind a USB host"
    if on(_VIRTIO):
        # The host behind a virtual disk is unknown, and such disks often claim to rotate.
        return "virtio", "a virtio disk"
    if name.startswith("nvme") or on(_NVME):
        transport = files.text(f"{node}/device/transport")[:32]
        return "nvme", f"an NVMe namespace{f' over {transport}' if transport else ''}"
    if on(_ISCSI):
        return "iscsi", "behind an iSCSI session"
    if on(_FIBRE):
        return "fc", "behind a Fibre Channel port"
    return _by_attributes(files, node, on(_SAS), on(_ATA))


def _by_attributes(files: SystemFiles, node: str, sas: bool, ata: bool) -> tuple[str, str]:
    rotational = files.text(f"{node}/queue/rotational")
    if rotational == "1":
        return "hdd", "queue/rotational is 1"
    if ata:
        return "sata", "on an ATA port"
    if files.text(f"{node}/device/vendor") == "ATA":
        return "sata", "a SATA disk behind a SCSI host (its vendor is ATA)"
    if sas:
        return "sas", "a SAS end device"
    if rotational == "0":
        return "unknown", "not rotating, and no transport that sysfs names"
    return "unknown", "sysfs says neither transport nor whether it rotates"
