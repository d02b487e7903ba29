"""`SimulatedDirectory`: a region's directory on a simulated disk."""

from __future__ import annotations

import errno

from tablespace.io.device import Device, IoQueue
from tablespace.testing.disk import ROOT, Disk
from tablespace.testing.simulated import SimulatedDevice, SimulatedQueue

SIMULATED_PATH = "/simulated-disk"


class SimulatedDirectory:
    """The `tablespace.io.directory.Directory` of a simulated disk.

    Parameters
    ----------
    disk : Disk, optional
        By default a new, empty one.
    """

    # A few records' worth, so that histories meet both filler and growth.
    filler_bytes = 512

    def __init__(self, disk: Disk | None = None) -> None:
        self.disk = Disk() if disk is None else disk
        self.path = SIMULATED_PATH

    def make(self, name: str) -> None:
        """Create a subdirectory where there is none."""
        if name and name not in self.disk.directories[ROOT]:
            self.disk.check("make", name)
            self.disk.make_directory(name)

    def exists(self, name: str) -> bool:
        """Say whether a file of this name is there."""
        return self.disk.find(name) is not None

    def list(self, name: str = "") -> list[str]:
        """List the names in a subdirectory, sorted."""
        node = ROOT if not name else self.disk.directories[ROOT].get(name)
        return sorted(self.disk.directories.get(node, {})) if node is not None else []

    def open(
        self,
        name: str,
        *,
        create: bool = False,
        exclusive: bool = False,
        direct: bool = False,
        alignment_bytes: int = 4096,
        memory_alignment_bytes: int = 512,
        read_only: bool = False,
    ) -> Device:
        """Open a file read-write, or with `read_only` for reading alone."""
        self.disk.check("open", name)
        node = self.disk.find(name)
        if node is not None and create and exclusive:
            raise FileExistsError(errno.EEXIST, "the file exists", name)
        if node is None:
            if not create:
                raise FileNotFoundError(errno.ENOENT, "no such file", name)
            node = self.disk.make_file(name)
        return SimulatedDevice(
            self.disk,
            node,
            f"{self.path}/{name}",
            direct,
            alignment_bytes,
            memory_alignment_bytes,
            read_only,
        )

    def _node(self, name: str) -> tuple[int, str, int]:
        folder, last = self.disk.resolve(name)
        node = self.disk.directories[folder].get(last)
        if node is None:
            raise FileNotFoundError(errno.ENOENT, "no such file", name)
        return folder, last, node

    def rename(self, old: str, new: str) -> None:
        """Rename within one directory, replacing what is there; atomic, also in a crash."""
        self.disk.check("rename", new)
        folder, last, node = self._node(old)
        target, name = self.disk.resolve(new)
        if target != folder:
            raise OSError(errno.EXDEV, "a rename stays within its directory here", new)
        if self.disk.directories[folder].get(name) == node:
            # rename(2) does nothing where both names are links to one file.
            return
        self.disk.set_names(folder, (name, node), (last, None))

    def link(self, old: str, new: str) -> None:
        """Give a file a second name, replacing what is there."""
        self.disk.check("link", new)
        _, _, node = self._node(old)
        target, name = self.disk.resolve(new)
        self.disk.set_names(target, (name, node))

    def unlink(self, name: str) -> None:
        """Remove a name; an absent one is fine."""
        if self.disk.find(name) is None:
            return
        self.disk.check("unlink", name)
        folder, last, _ = self._node(name)
        self.disk.set_names(folder, (last, None))

    def sync(self, name: str = "") -> None:
        """Make the names in a subdirectory durable."""
        self.disk.sync_names(name)

    def lock(self, device: Device) -> bool:
        """Take the exclusive lock on an open file; False when another device holds it."""
        assert isinstance(device, SimulatedDevice)
        holder = self.disk.locks.setdefault(device.node, device)
        return holder is device

    def same_file(self, device: Device, name: str) -> bool:
        """Say whether `name` still names the open file."""
        assert isinstance(device, SimulatedDevice)
        return self.disk.find(name) == device.node

    def free_bytes(self) -> int:
        """Return the disk's free bytes: none when it is full, else a number a test may set."""
        return 0 if self.disk.full else self.disk.free_bytes

    def queue(self, engine: str, depth: int) -> IoQueue:
        """Make a queue that shuffles completions."""
        self.disk.check("queue", engine)
        return SimulatedQueue(self.disk, depth, engine)
