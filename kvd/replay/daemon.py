"""Starts, stops and kills a kvd daemon of one's own over a scratch directory."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kvd.path_region import REGION_DIRECTORY

START_TIMEOUT_S = 120.0
"""Bound for a start: recovery of a region, on a slow disk, with room to spare."""

STOP_TIMEOUT_S = 60.0
"""Bound for a clean stop: the daemon drains for 20 s at most, then writes its snapshot."""

POLL_S = 0.002
LOG_TAIL_BYTES = 4096
SOCKET_PATH_BYTES = 100
"""Longest socket path used; the kernel's limit is 107 and the daemon adds a suffix."""


class DaemonError(Exception):
    """Reports a daemon that did not start, or ended otherwise than asked."""


class Daemon:
    """One daemon process at a time, over one socket and one region.

    Parameters
    ----------
    directory : pathlib.Path
        Holds the daemon's log and, where its path is short enough, the socket.
    long_path : pathlib.Path
        Long tier's directory; kept over `stop`, `kill` and the next `start`.
    max_bytes, long_bytes : int
        Sizes of the arena and of the region.
    slot_bytes : int or str
        Of the region's slots; several with commas between.
    arguments : sequence of str
        Further flags of the daemon.
    """

    def __init__(
        self,
        directory: Path,
        long_path: Path,
        *,
        max_bytes: int,
        long_bytes: int,
        slot_bytes: int | str,
        arguments: Sequence[str] = (),
    ) -> None:
        self.socket = directory / "kvd.sock"
        self.long_path = long_path
        self.region = long_path / REGION_DIRECTORY
        self.log = directory / "kvd.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._command = [
            sys.executable,
            "-m",
            "kvd",
            f"--socket={self.socket}",
            f"--max-bytes={max_bytes}",
            f"--long-path={long_path}",
            f"--long-bytes={long_bytes}",
            f"--tablespace-slot-bytes={slot_bytes}",
            *arguments,
        ]

    @property
    def pid(self) -> int | None:
        """Process id of the daemon, None while none runs."""
        return None if self._process is None else self._process.pid

    def spawn(self) -> None:
        """Start the process without waiting until it serves."""
        if self._process is not None:
            raise DaemonError(f"a daemon already runs as process {self._process.pid}")
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def start(self, timeout_s: float = START_TIMEOUT_S) -> float:
        """Start the process, wait until it serves, and return the seconds that took.

        Raises
        ------
        DaemonError
            When it exits or does not serve in time; the text carries the end of its log.
        """
        began = time.monotonic()
        self.spawn()
        process = self._process
        assert process is not None
        while not self._serves():
            if process.poll() is not None:
                self._process = None
                raise DaemonError(
                    f"the daemon exited with status {process.returncode}:\n{self._log_tail()}"
                )
            if time.monotonic() - began > timeout_s:
                self.kill()
                raise DaemonError(
                    f"the daemon did not serve within {timeout_s:.0f} s:\n{self._log_tail()}"
                )
            time.sleep(POLL_S)
        return time.monotonic() - began

    def stop(self, timeout_s: float = STOP_TIMEOUT_S) -> float:
        """Stop the daemon by SIGTERM and return the seconds that took.

        Raises
        ------
        DaemonError
            When it does not exit in time (it is killed then) or not with status 0.
        """
        process = self._process
        if process is None:
            return 0.0
        began = time.monotonic()
        process.terminate()
        try:
            status = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise DaemonError(
                f"the daemon did not stop within {timeout_s:.0f} s:\n{self._log_tail()}"
            ) from None
        self._process = None
        if status != 0:
            raise DaemonError(f"the daemon stopped with status {status}:\n{self._log_tail()}")
        return time.monotonic() - began

    def kill(self) -> None:
        """Kill the daemon by SIGKILL and reap it.

        Raises
        ------
        DaemonError
            When it had already ended by itself: what should have been a crash was none.
        """
        process = self._process
        if process is None:
            return
        process.kill()
        status = process.wait()
        self._process = None
        if status != -signal.SIGKILL:
            raise DaemonError(
                f"the daemon had ended before it was killed, status {status}:\n{self._log_tail()}"
            )

    def close(self) -> None:
        """End the daemon in whatever way works; raises nothing."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _serves(self) -> bool:
        # After a kill the old socket file is still there: only a connection tells.
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(os.fspath(self.socket))
            except OSError:
                return False
        return True

    def _log_tail(self) -> str:
        try:
            with open(self.log, "rb") as log:
                log.seek(max(0, log.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
                return log.read().decode(errors="replace").strip()
        except OSError as error:
            return f"(no log: {error})"


def scratch_parent() -> Path:
    """Return where scratch regions go: $TMPDIR, else /var/tmp (a disk where /tmp may be RAM)."""
    if os.environ.get("TMPDIR"):
        return Path(tempfile.gettempdir())
    durable = Path("/var/tmp")
    if durable.is_dir() and os.access(durable, os.W_OK):
        return durable
    return Path(tempfile.gettempdir())


@contextmanager
def scratch_daemon(
    parent: Path,
    *,
    max_bytes: int,
    long_bytes: int,
    slot_bytes: int | str,
    arguments: Sequence[str] = (),
) -> Iterator[Daemon]:
    """Make a daemon, not started, over a new directory below ``parent``; end and remove both."""
    directory = Path(tempfile.mkdtemp(prefix="kvd-replay-", dir=parent))
    # The region may lie deep in a tree; a socket's path may not.
    short = directory
    if len(os.fsencode(directory / "kvd.sock")) > SOCKET_PATH_BYTES:
        short = Path(tempfile.mkdtemp(prefix="kvd-", dir="/tmp"))
    daemon = Daemon(
        short,
        directory / "long",
        max_bytes=max_bytes,
        long_bytes=long_bytes,
        slot_bytes=slot_bytes,
        arguments=arguments,
    )
    try:
        yield daemon
    finally:
        daemon.close()
        for path in {directory, short}:
            shutil.rmtree(path)
