"""A root of chunk files: its own private directory, the lock, the files in it."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvd_connectors.gpu_direct.errors import GpuDirectError

OWN = "kvcache-1"
SUFFIX = ".kvcache"
TEMPORARY = ".writing"
LASTING, ENDING = 0o600, 0o400
"""Modes of chunk files: of one with a time to live, so that who looks for others opens none."""
LOCK_WAIT_S = 5.0
"""What holds the lock looks at files and removes some; a writer waits no longer than this."""
POLL_S = 0.002


class LockTimeoutError(Exception):
    """Another process holds the root's lock for longer than anybody should."""


@dataclass(frozen=True)
class Found:
    """A chunk file.

    Attributes
    ----------
    used_ns : int
        When it was written or last read: the file's time of change.
    """

    used_ns: int
    size_bytes: int
    path: Path


class RootDirectory:
    """Where one root's chunk files are. Several processes of one user may share it.

    Parameters
    ----------
    root : Path
        A directory that exists or can be made.
    lock_wait_s : float

    Raises
    ------
    GpuDirectError
        It cannot be made, is another user's, or knows no locks.
    """

    def __init__(self, root: Path, lock_wait_s: float = LOCK_WAIT_S) -> None:
        self.root = root
        self.path = root / OWN
        self.chunks = self.path / "chunks"
        self._chunks_text = str(self.chunks)
        self.lock_path = self.path / "lock"
        self.account_path = self.path / "account"
        self._lock_wait_s = lock_wait_s
        try:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            _make_private(self.path)
            _make_private(self.chunks)
            with self.locked():
                pass
        except LockTimeoutError as error:
            raise GpuDirectError(f"{error}. Remedy: end that process") from error
        except OSError as error:
            raise GpuDirectError(
                f"no chunk files can be kept in {root}: {error}. Remedy: name a directory in "
                "KVD_HIPFILE_ROOTS that this user may write to, on a local file system"
            ) from error

    def path_of(self, name: str) -> Path:
        """Return where a chunk of this name is; a directory of a few hundred of them each."""
        return self.chunks / name[:2] / f"{name}{SUFFIX}"

    def look_at(self, name: str) -> os.stat_result | None:
        """Return what the system tells of a chunk's file, None where there is none."""
        try:
            # Texts: a look-up does this dozens of times before the engine's next step.
            found = os.lstat(f"{self._chunks_text}/{name[:2]}/{name}{SUFFIX}")
        except OSError:
            return None
        return found if stat.S_ISREG(found.st_mode) else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the root's lock, against other threads and other processes.

        Raises
        ------
        LockTimeoutError
        """
        fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            self._wait_for(fd)
            yield
        finally:
            unlock_and_close(fd)

    def _wait_for(self, fd: int) -> None:
        deadline = time.monotonic() + self._lock_wait_s
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise LockTimeoutError(
                        f"{self.lock_path} is held by another process for over "
                        f"{self._lock_wait_s:g} s"
                    ) from None
                time.sleep(POLL_S)

    def create(
        self, name: str, size_bytes: int, flags: int, mode: int = LASTING
    ) -> tuple[int, Path]:
        """Return a new file for a chunk that is to be written, its space taken; lock held.

        The file is locked while it is open, which is how others tell it from a leftover.

        Raises
        ------
        OSError
            As where the disk is full; nothing is left then.
        """
        # A name of random digits: nothing that others may be at.
        path = self.chunks / f"{name}-{secrets.token_hex(8)}{TEMPORARY}"
        usual = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(path, usual | flags, mode)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(fd, 0, size_bytes)
        except BaseException:
            os.close(fd)
            path.unlink()
            raise
        return fd, path

    def place(self, temporary: Path, name: str) -> int:
        """Give a written file its name; return the size of a file that had it. Lock held."""
        path = self.path_of(name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        replaced = size_of(path)
        os.replace(temporary, path)
        return replaced

    def open_chunk(self, name: str, flags: int) -> int:
        """Return a descriptor of a chunk's file, which is a plain file of this user's.

        Raises
        ------
        OSError
            FileNotFoundError where there is none.
        """
        fd = os.open(
            self.path_of(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | flags
        )
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            os.close(fd)
            raise PermissionError(errno.EPERM, "no plain file of this user's", name)
        return fd

    def find_chunks(self) -> list[Found]:
        """Return every chunk file, in no order."""
        found: list[Found] = []
        for shard in _entries(self.chunks):
            if not shard.is_dir(follow_symlinks=False):
                continue
            for entry in _entries(Path(shard.path)):
                if not entry.name.endswith(SUFFIX):
                    continue
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:
                    continue
                found.append(Found(status.st_mtime_ns, status.st_size, Path(entry.path)))
        return found

    def find_temporary(self) -> list[Path]:
        """Return every file that is being written, or was left so."""
        return [Path(each.path) for each in _entries(self.chunks) if each.name.endswith(TEMPORARY)]


def is_left_behind(path: Path) -> bool:
    """Say whether nobody writes a temporary file any more; the root's lock is held.

    A writer locks its file before it lets go of the root's lock, and the kernel unlocks it when
    the writer ends, however it ends.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    finally:
        os.close(fd)


def unlock_and_close(fd: int) -> None:
    """Close a locked file. A child that was forked meanwhile would keep the lock otherwise."""
    fcntl.flock(fd, fcntl.LOCK_UN)
    os.close(fd)


def size_of(path: Path) -> int:
    """Return how long a file is, 0 where there is none."""
    try:
        return path.lstat().st_size
    except FileNotFoundError:
        return 0


def _make_private(path: Path) -> None:
    """Make a directory for this user alone; one that is there has to be that."""
    try:
        path.mkdir(mode=0o700)
    except FileExistsError:
        pass
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "no directory", str(path))
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        raise PermissionError(
            errno.EPERM,
            f"it belongs to user {status.st_uid} with mode {status.st_mode & 0o777:o}, and has to "
            f"be user {os.geteuid()}'s alone",
            str(path),
        )


def _entries(path: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return list(entries)
    except FileNotFoundError:
        return []
