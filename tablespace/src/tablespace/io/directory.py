"""The seam to names: files of one region as create, rename, link, unlink, list, sync, lock.

Nothing else in tablespace names a file to the operating system.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
from typing import Protocol

from tablespace.io.device import Device, IoQueue
from tablespace.io.posix_device import PosixDevice, PosixQueue
from tablespace.io.uring_device import UringQueue

FILE_MODE = 0o600
DIRECTORY_MODE = 0o700


class Directory(Protocol):
    """A region's directory and the queues its files are reached through.

    Names are relative, at most one level deep (``containers/0000.bin``).
    """

    path: str
    # Newlines laid ahead of a journal's end at a time; 0 for none.
    filler_bytes: int

    def make(self, name: str) -> None:
        """Create a subdirectory (the empty name: the directory itself) where there is none."""

    def exists(self, name: str) -> bool:
        """Say whether anything has this name; an error other than its absence is raised."""

    def list(self, name: str = "") -> list[str]:
        """List the names in a subdirectory, sorted; an absent one is empty."""

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
        """Open a regular file read-write, or with `read_only` for reading alone.

        Anything else under the name is an OSError.
        """

    def rename(self, old: str, new: str) -> None:
        """Rename, replacing what is there."""

    def link(self, old: str, new: str) -> None:
        """Give a file a second name, replacing what is there (atomically)."""

    def unlink(self, name: str) -> None:
        """Remove a name; an absent one is fine."""

    def sync(self, name: str = "") -> None:
        """Make the names in a subdirectory durable."""

    def lock(self, device: Device) -> bool:
        """Take the exclusive lock on an open file; False when another holds it."""

    def same_file(self, device: Device, name: str) -> bool:
        """Say whether `name` still names the open file."""

    def free_bytes(self) -> int:
        """Return the free bytes of the file system, also before the directory is made."""

    def queue(self, engine: str, depth: int) -> IoQueue:
        """Make a queue for files of this directory."""


class PosixDirectory:
    """A directory of the real file system."""

    # A journal of 64 KiB blocks fills this with some 7,000 records.
    filler_bytes = 1 << 20

    def __init__(self, path: str | os.PathLike[str]) -> None:
        if not os.fspath(path):
            raise ValueError(
                "an empty path is no region's. Remedy: name a directory, '.' for this"
            )
        self.path = os.path.abspath(os.fsdecode(path))

    def _full(self, name: str) -> str:
        return os.path.join(self.path, name) if name else self.path

    def make(self, name: str) -> None:
        full = self._full(name)
        if name:
            os.makedirs(full, mode=DIRECTORY_MODE, exist_ok=True)
            return
        missing = []
        at = full
        while not os.path.isdir(at):
            missing.append(at)
            at = os.path.dirname(at)
        for each in reversed(missing):
            os.mkdir(each, DIRECTORY_MODE)
            _sync_directory(os.path.dirname(each))

    def exists(self, name: str) -> bool:
        # Not os.path.exists: to that a disk that cannot be read is an empty one, and the end of a
        # symbolic link decides.
        try:
            os.lstat(self._full(name))
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

    def list(self, name: str = "") -> list[str]:
        try:
            return sorted(os.listdir(self._full(name)))
        except FileNotFoundError:
            return []

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
        flags = os.O_RDONLY if read_only else os.O_RDWR
        # Never through a link to a file elsewhere.
        flags |= os.O_CLOEXEC | os.O_NOFOLLOW
        flags |= os.O_CREAT if create else 0
        flags |= os.O_EXCL if exclusive else 0
        flags |= os.O_DIRECT if direct else 0
        full = self._full(name)
        try:
            descriptor = os.open(full, flags, FILE_MODE)
        except OSError as error:
            raise _explain(error, full) from error
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise _explain(OSError(errno.ENXIO, ""), full)
        return PosixDevice(
            full, descriptor, direct, alignment_bytes, memory_alignment_bytes, read_only
        )

    def rename(self, old: str, new: str) -> None:
        os.rename(self._full(old), self._full(new))

    def link(self, old: str, new: str) -> None:
        # link(2) does not replace: make the second name under a temporary one, then rename.
        temporary = new + ".tmp"
        self.unlink(temporary)
        os.link(self._full(old), self._full(temporary))
        os.rename(self._full(temporary), self._full(new))
        # rename(2) does nothing when both names are links to the same file already.
        self.unlink(temporary)

    def unlink(self, name: str) -> None:
        try:
            os.unlink(self._full(name))
        except FileNotFoundError:
            pass

    def sync(self, name: str = "") -> None:
        _sync_directory(self._full(name))

    def lock(self, device: Device) -> bool:
        assert isinstance(device, PosixDevice)
        try:
            fcntl.flock(device.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return False
            raise
        return True

    def same_file(self, device: Device, name: str) -> bool:
        assert isinstance(device, PosixDevice)
        try:
            named = os.stat(self._full(name))
        except FileNotFoundError:
            return False
        held = os.fstat(device.fileno())
        return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)

    def free_bytes(self) -> int:
        at = self.path
        while not os.path.isdir(at):
            at = os.path.dirname(at)
        found = os.statvfs(at)
        return found.f_bavail * found.f_frsize

    def queue(self, engine: str, depth: int) -> IoQueue:
        return UringQueue(depth) if engine == "uring" else PosixQueue(depth)


def _explain(error: OSError, path: str) -> OSError:
    """Return an error that says what is wrong with a file that could not be opened."""
    try:
        found = os.lstat(path).st_mode
    except OSError:
        found = stat.S_IFREG
    if not stat.S_ISREG(found):
        kinds = {stat.S_IFLNK: "a symbolic link", stat.S_IFDIR: "a directory"}
        return OSError(
            error.errno,
            f"{kinds.get(stat.S_IFMT(found), 'a pipe, socket or device')} stands where a region "
            "has a file. Remedy: move it away; if it stands for a file of the region, put that in "
            "its place",
            path,
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return OSError(
            error.errno,
            f"{os.strerror(error.errno)}: a region keeps one descriptor a container and some 20 "
            f"more; this process may have {resource.getrlimit(resource.RLIMIT_NOFILE)[0]} "
            "(RLIMIT_NOFILE). Remedy: raise it (ulimit -n), or make a region of larger "
            "containers (container_bytes)",
            path,
        )
    return error


def _sync_directory(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
