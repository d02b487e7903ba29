"""The daemon's socket: one holder, a name that appears only when it serves."""

from __future__ import annotations

import fcntl
import glob
import os
import socket
import stat

from kvd.errors import ConfigError, RefusedError
from kvd.peers import Access, peer_credentials
from kvd.refusals import socket_refusal

MAX_SOCKET_PATH_BYTES = 107  # unix(7): sun_path, less its NUL.
BACKLOG = 128
PROBE_TIMEOUT_S = 1.0


class ListeningSocket:
    """A Unix socket under a temporary name until `announce`.

    Parameters
    ----------
    path : str
        Where clients will find it.
    access : Access
        Who may connect: decides on the socket's mode and group.

    Raises
    ------
    RefusedError
        When a daemon serves or starts there; names it.
    ConfigError
        When the path cannot be used.
    """

    def __init__(self, path: str, access: Access | None = None) -> None:
        self.path = path
        self._access = access if access is not None else Access()
        self._temporary = f"{path}.{os.getpid()}"
        self._announced = False
        if len(os.fsencode(self._temporary)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"--socket {path}: too long for a socket, which takes "
                f"{MAX_SOCKET_PATH_BYTES} bytes; choose a shorter path"
            )
        try:
            self._lock_fd = self._take_lock()
            try:
                self._remove_leftovers()
                self.socket = self._bind()
            except BaseException:
                self._drop_lock(self._lock_fd)
                raise
        except OSError as error:
            raise socket_refusal(path, error) from error

    def announce(self) -> None:
        """Give the socket its name: from now on clients connect."""
        os.rename(self._temporary, self.path)
        self._announced = True

    def withdraw(self) -> None:
        """Take the name away, first of all: nobody shall connect to a daemon that stops."""
        self._unlink(self.path if self._announced else self._temporary)
        self._announced = False

    def close(self) -> None:
        """Take the name away and close. The lock goes last: until then the path is ours."""
        self.withdraw()
        self.socket.close()
        self._drop_lock(self._lock_fd)

    def _drop_lock(self, fd: int) -> None:
        self._unlink(self._lock_path)
        os.close(fd)

    def _remove_leftovers(self) -> None:
        """Remove the sockets of daemons killed as they started: none starts beside us."""
        for name in glob.glob(f"{glob.escape(self.path)}.*"):
            if name.removeprefix(f"{self.path}.").isdecimal() and _is_socket(name):
                self._unlink(name)

    @staticmethod
    def _unlink(path: str) -> None:
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass

    @property
    def _lock_path(self) -> str:
        return f"{self.path}.lock"

    def _take_lock(self) -> int:
        """Hold the lock file for life: it decides between two daemons that start together."""
        if not os.path.isdir(os.path.dirname(os.path.abspath(self.path))):
            raise ConfigError(
                f"--socket {self.path}: its directory does not exist; make it, or choose another"
            )
        if os.path.exists(self.path) and not _is_socket(self.path):
            raise ConfigError(
                f"--socket {self.path}: is there and is no socket; remove it, or choose another"
            )
        while True:
            fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                noted = os.pread(fd, 32, 0).decode(errors="replace").strip()
                os.close(fd)
                raise self._refusal(_live_holder(self.path), noted) from None
            except OSError:
                # Locks are refused to everybody there, so it is nobody's.
                self._drop_lock(fd)
                raise
            if _same_file(fd, self._lock_path):
                break
            os.close(fd)  # Its holder removed it between our open and our lock.
        try:
            holder = _live_holder(self.path)
            if holder is not None:
                raise self._refusal(holder, "")
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            self._drop_lock(fd)
            raise
        return fd

    def _refusal(self, holder: int | None, noted: str) -> RefusedError:
        who = str(holder) if holder else noted or "unknown"
        return RefusedError(
            f"the socket {self.path} is in use by process {who}; stop that one, or choose "
            "another --socket"
        )

    def _bind(self) -> socket.socket:
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.unlink(self._temporary)
        except FileNotFoundError:
            pass
        # The mode is set by umask at bind(2): a chmod after it would leave a moment between.
        previous = os.umask(0o777 & ~self._access.socket_mode)
        try:
            listening.bind(self._temporary)
        finally:
            os.umask(previous)
        if self._access.socket_gid is not None:
            os.chown(self._temporary, -1, self._access.socket_gid)
        listening.listen(BACKLOG)
        listening.setblocking(False)
        return listening


def _is_socket(path: str) -> bool:
    return stat.S_ISSOCK(os.stat(path).st_mode)


def _same_file(fd: int, path: str) -> bool:
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return False
    held = os.fstat(fd)
    return (held.st_dev, held.st_ino) == (found.st_dev, found.st_ino)


def _live_holder(path: str) -> int | None:
    """Return the pid that listens on a path, 0 if it cannot be told; None: nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_TIMEOUT_S)
        try:
            probe.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError:
            return 0  # Busy or of another user: not ours to replace.
        return peer_credentials(probe)[0]
