"""What kind of storage a path is on, and how the engine treats each kind: the one set of rules."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field

from tablespace.io.block_devices import BlockDeviceWalk, Layer
from tablespace.io.mounts import Mount, mount_of
from tablespace.io.system_files import SystemFiles

# Below this, a group of four 64 KiB blocks already takes several WRITE calls to the server.
LOW_WSIZE_BYTES = 256 << 10
# What Linux clients and servers agree on at most (nfs(5), wsize).
FULL_WSIZE_BYTES = 1 << 20
# Loops on loops, overlays on overlays.
MAX_NESTING = 8


@dataclass(frozen=True)
class Treatment:
    """How a kind of storage is reached.

    Attributes
    ----------
    io_mode : str
        "direct" (where a trial write works) or "buffered".
    concurrency : int
        Transfers in flight.
    flush_interval_ms : int
        How long commits may be gathered where a put need not be durable on return.
    why : str
    """

    io_mode: str
    concurrency: int
    flush_interval_ms: int
    why: str


# From the best to the worst: of several devices below a path, the last of these counts.
TREATMENTS = {
    "nvme": Treatment("direct", 64, 20, "many commands in flight, no seeks"),
    "virtio": Treatment("direct", 64, 20, "the host has its own cache"),
    "sas": Treatment("direct", 64, 20, "many commands in flight, no seeks"),
    "weka": Treatment("direct", 64, 20, "a parallel file system: many requests in flight"),
    "parallel": Treatment("direct", 64, 20, "a parallel file system: many requests in flight"),
    "fc": Treatment("direct", 64, 20, "an array with its own cache"),
    "iscsi": Treatment("direct", 64, 20, "an array with its own cache"),
    "unknown": Treatment("direct", 64, 20, "taken for an SSD: it does not say that it rotates"),
    "tmpfs": Treatment("buffered", 32, 20, "it is memory: a direct write saves no copy"),
    "sata": Treatment("buffered", 32, 20, "a queue of 32 commands, better merged by the kernel"),
    "overlay": Treatment("buffered", 32, 20, "what is below is not known for sure"),
    "usb": Treatment("buffered", 8, 100, "a bridge with a short queue"),
    "hdd": Treatment("buffered", 32, 100, "it seeks: the page cache merges and reads ahead"),
    "network": Treatment("buffered", 32, 50, "a round trip to a server for each transfer"),
    "nfs": Treatment("buffered", 32, 50, "the client's page cache gathers writes to wsize"),
}
DEVICE_CLASSES = tuple(TREATMENTS)

_CLASS_OF_FILE_SYSTEM = {
    "nfs": "nfs",
    "nfs4": "nfs",
    "wekafs": "weka",
    "tmpfs": "tmpfs",
    "ramfs": "tmpfs",
    "overlay": "overlay",
    "fuse-overlayfs": "overlay",
    "fuse.fuse-overlayfs": "overlay",
    "lustre": "parallel",
    "gpfs": "parallel",
    "beegfs": "parallel",
    "cifs": "network",
    "smb3": "network",
    "smb2": "network",
    "9p": "network",
    "virtiofs": "network",
    "ceph": "network",
    "afs": "network",
    "fuse": "network",
}
# Options of a mount that the client found out itself; a new mount finds them again.
_FOUND_BY_CLIENT = {
    "addr",
    "clientaddr",
    "mountaddr",
    "mountvers",
    "mountport",
    "mountproto",
    "namlen",
    "rsize",
    "wsize",
}


@dataclass(frozen=True)
class Classification:
    """What a path is on, and what `io_mode="auto"` makes of it.

    Attributes
    ----------
    path : str
    device_class : str
        One of nvme, virtio, sas, weka, parallel (Lustre, GPFS, BeeGFS), fc, iscsi, unknown,
        tmpfs, sata, overlay, usb, hdd, network (CIFS, 9p, Ceph, FUSE), nfs. Of several devices
        below one path the worst.
    file_system, mount_point : str
        Empty where unknown.
    chain : list of Layer
        What the path's bytes go through, and what says so.
    io_mode : str
        "direct" (where the trial write at open works) or "buffered".
    concurrency : int
        Transfers in flight.
    flush_interval_ms : int
        How long commits may be gathered where a put need not be durable on return.
    reasons : list of str
        A sentence for the class and one for the treatment.
    warnings : list of str
        What makes it slower than it need be, with the remedy.
    """

    path: str
    device_class: str
    file_system: str
    mount_point: str
    chain: list[Layer]
    io_mode: str
    concurrency: int
    flush_interval_ms: int
    reasons: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def classify(
    path: str | os.PathLike[str], *, sys_root: str = "/sys", proc_root: str = "/proc"
) -> Classification:
    """Say what kind of storage a path is on and how a region there would be reached.

    Parameters
    ----------
    path : path
        Need not exist: its nearest ancestor counts.
    sys_root, proc_root : str
        Where sysfs and procfs are mounted.

    Notes
    -----
    Reads only, and raises for no state of the system: what cannot be found out is "unknown".
    Whether O_DIRECT works is tried when a region is opened, not here.
    """
    full = os.path.abspath(os.fsdecode(path))
    files = SystemFiles(sys_root, proc_root)
    mount = mount_of(full, files)
    chain = _layers(full, files, 0)
    classes = [layer.device_class for layer in chain if layer.device_class]
    device_class = max(classes, key=DEVICE_CLASSES.index, default="unknown")
    treatment = TREATMENTS[device_class]
    decisive = next((layer for layer in chain if layer.device_class == device_class), None)
    what = f"{decisive.name}: {decisive.why}" if decisive else "nothing says what is below"
    on = f"{mount.file_system} at {mount.mount_point}" if mount.mount_point else "unknown mount"
    return Classification(
        path=_printable(full),
        device_class=device_class,
        file_system=_printable(mount.file_system),
        mount_point=_printable(mount.mount_point),
        chain=[
            Layer(_printable(each.name), each.device_class, _short(each.why)) for each in chain
        ],
        io_mode=treatment.io_mode,
        concurrency=treatment.concurrency,
        flush_interval_ms=treatment.flush_interval_ms,
        reasons=[
            _short(f"storage {device_class} ({what}), {on}"),
            f"{treatment.io_mode}, {treatment.concurrency} transfers in flight: {treatment.why}",
        ],
        warnings=[_printable(text) for text in _warnings(mount, device_class)],
    )


def _layers(path: str, files: SystemFiles, nesting: int) -> list[Layer]:
    """Return what a path's bytes go through, from its file system down."""
    mount = mount_of(path, files)
    name = mount.source or mount.number or "?"
    if nesting > MAX_NESTING:
        return [Layer(name, "unknown", "file systems nested too deep")]
    kind = mount.file_system
    found = _CLASS_OF_FILE_SYSTEM.get(kind)
    if found is None and kind.startswith("fuse."):
        found = "network"
    if found is not None:
        layers = [Layer(name, found, f"file system {kind}")]
        upper = mount.options.get("upperdir", "")
        # The directory is named as its mounter saw it, and is often not to be seen from here.
        if found == "overlay" and upper.startswith("/") and files.exists(upper):
            layers += _layers(upper, files, nesting + 1)
        return layers
    walk = BlockDeviceWalk(files, lambda backing: _layers(backing, files, nesting + 1))
    anonymous = mount.number.startswith("0:") or not mount.number
    if mount.source.startswith("/dev/") and (anonymous or kind in ("btrfs", "bcachefs")):
        for source in mount.source.split(":"):
            walk.add_source(source)
    elif mount.number and not anonymous:
        walk.add_number(mount.number)
    else:
        return [Layer(name, "unknown", f"file system {kind or 'unknown'}, no block device")]
    return walk.layers


def _warnings(mount: Mount, device_class: str) -> list[str]:
    if device_class != "nfs":
        return []
    text = mount.options.get("wsize", "")
    if not (text.isascii() and text.isdigit()) or len(text) > 12 or int(text) >= LOW_WSIZE_BYTES:
        return []
    return [
        f"NFS at {mount.mount_point} has wsize={text}: every 1 MiB written takes "
        f"{-(-FULL_WSIZE_BYTES // max(1, int(text)))} calls to the server. Remedy: mount it again "
        f"(mount -o remount does not change wsize): {remount_command(mount)}"
    ]


def remount_command(mount: Mount) -> str:
    """Return the commands that mount an NFS again with the largest transfers."""
    kept = [
        f"{name}={value}" if value else name
        for name, value in mount.options.items()
        if name not in _FOUND_BY_CLIENT
    ]
    options = ",".join([*kept, f"rsize={FULL_WSIZE_BYTES}", f"wsize={FULL_WSIZE_BYTES}"])
    at = shlex.quote(mount.mount_point)
    return (
        f"umount {at} && mount -t {mount.file_system} -o {shlex.quote(options)} "
        f"{shlex.quote(mount.source)} {at}"
    )


def _printable(text: str) -> str:
    return text.encode("ascii", "backslashreplace").decode("ascii")


def _short(text: str) -> str:
    """Bound a sentence: it goes into region.json, beside others."""
    out = _printable(text)
    return out if len(out) <= 240 else out[:237] + "..."
