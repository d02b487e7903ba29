"""The clients of a soak: processes that are started, killed, replaced, paused and ended."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvd.soak.board import Board, Cell

WORKER = (sys.executable, "-m", "kvd.soak.worker")
PAUSE_S = 30.0
END_S = 30.0
POLL_S = 0.01
TAIL_BYTES = 2000


class Clients:
    """The client processes, one per row of the board.

    Parameters
    ----------
    directory : pathlib.Path
        For the board and the clients' log.
    count : int
        How many at once.
    socket : pathlib.Path
        The daemon's.
    arguments : sequence
        What a client's command line has behind socket, board, row and seed.
    source : random.Random
        Chooses seeds and victims.
    command : sequence of str
        Runs a client; another one in a test of the soak.
    """

    def __init__(
        self,
        directory: Path,
        count: int,
        *,
        socket: Path,
        arguments: Sequence[object],
        source: random.Random,
        command: Sequence[str] = WORKER,
    ) -> None:
        self.board = Board(directory / "board", count)
        self.log = directory / "clients.log"
        self.killed = 0
        self._path = directory / "board"
        self._socket = socket
        self._arguments = arguments
        self._source = source
        self._command = command
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pauses = 0

    def start(self) -> None:
        """Start a client for every row."""
        for row in range(1, self.board.clients + 1):
            self._start(row)

    def _start(self, row: int) -> None:
        words = [self._socket, self._path, row, self._source.randrange(1 << 30), *self._arguments]
        with open(self.log, "ab") as log:
            self._processes[row] = subprocess.Popen(
                [*self._command, *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def kill_one(self) -> None:
        """Kill a client wherever it is in its work, and start another in its place."""
        row = self._source.choice(list(self._processes))
        process = self._processes[row]
        process.kill()
        process.wait()
        self.killed += 1
        self._start(row)

    def ended(self) -> list[str]:
        """Say which clients ended by themselves, and start others."""
        found = []
        for row, process in list(self._processes.items()):
            if process.poll() is not None:
                found.append(f"client {row} ended with {process.returncode}: {self.tail()}")
                self._start(row)
        return found

    def pause(self, meanwhile: Callable[[], None]) -> str:
        """Have every client rest; return who does not, "" for none."""
        self._pauses += 1
        self.board.put(0, Cell.PAUSE, self._pauses)
        deadline = time.monotonic() + PAUSE_S
        while busy := [
            row
            for row, process in self._processes.items()
            if self.board.get(row, Cell.PAUSE) != self._pauses and process.poll() is None
        ]:
            if time.monotonic() > deadline:
                return f"clients {busy} did not come to rest within {PAUSE_S:.0f} s"
            meanwhile()
            time.sleep(POLL_S)
        return ""

    def resume(self) -> None:
        """Have every client go on."""
        self.board.put(0, Cell.PAUSE, 0)

    def end(self) -> list[str]:
        """Have every client end by itself; say which did not."""
        self.board.put(0, Cell.STOP, 1)
        self.resume()
        found = []
        deadline = time.monotonic() + END_S
        for row, process in self._processes.items():
            try:
                status = process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                found.append(f"client {row} did not end within {END_S:.0f} s")
                continue
            if status:
                found.append(f"client {row} ended with {status}: {self.tail()}")
        self.close()
        return found

    def close(self) -> None:
        """Kill whoever is left."""
        for process in self._processes.values():
            if process.poll() is None:
                process.kill()
                process.wait()
        self._processes.clear()

    def tail(self) -> str:
        """Return the end of what clients wrote."""
        try:
            return self.log.read_bytes()[-TAIL_BYTES:].decode(errors="replace").strip()
        except FileNotFoundError:
            return ""
