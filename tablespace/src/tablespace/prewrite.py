"""Write containers ahead of their first use, while little else is written.

A sync of slots that were only allocated also converts their extents from unwritten to written
(docs/decisions/prewriting.md).  Zeros are written into containers that belong to no pool, between
two commits: so no container can be claimed while zeros are on their way to it.  Nothing is
persisted: the file system knows which parts of a file were never written.
"""

from __future__ import annotations

import logging
import threading
import weakref

from tablespace._core.aligned_buffer import AlignedBuffer
from tablespace.commit import Committer
from tablespace.errors import ClosedError
from tablespace.io.device import Device
from tablespace.io.mounts import file_system_of
from tablespace.io.open import IoChoice
from tablespace.layout import Geometry, container_name, format_size
from tablespace.requests import Barrier

logger = logging.getLogger("tablespace")

# Written while commits wait: about a millisecond.
CHUNK_BYTES = 1 << 20
# How many containers of no pool are kept written.
AHEAD_CONTAINERS = 2
# With one chunk a tick, at most 50 MiB a second.
TICK_S = 0.02
REST_S = 0.5
# More commits than this in a tick, and the disk is left to them.
BUSY_COMMITS = 1
# Smaller ones are filled within a second.
MIN_CONTAINER_BYTES = 16 << 20
# Where an allocated block is an unwritten extent until it is first written.
FILE_SYSTEMS = ("ext4", "xfs")


def reason_against(path: str, geometry: Geometry, choice: IoChoice) -> str | None:
    """Return why a region's containers are not to be written ahead, or None."""
    if geometry.container_bytes < MIN_CONTAINER_BYTES:
        return f"containers of less than {format_size(MIN_CONTAINER_BYTES)}"
    if not choice.direct:
        return "the page cache is in use"
    file_system = file_system_of(path)
    if file_system not in FILE_SYSTEMS:
        return f"not known to help on {file_system or 'this file system'}"
    return None


class Prewriter:
    """Writes zeros where no value was ever written.

    Attributes
    ----------
    written_bytes : int
    problem : str or None
        Why it stopped for good.

    Notes
    -----
    `step` is for one thread at a time: the one that `start` starts, or a test.
    """

    def __init__(self, path: str, devices: list[Device], committer: Committer) -> None:
        self._path = path
        self._devices = devices
        self._committer = committer
        self._zeros = AlignedBuffer(CHUNK_BYTES)
        # Containers below it belong to a pool; none ever comes back.
        self._first = 0
        self._done: set[int] = set()
        self._groups = committer.groups
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self.written_bytes = 0
        self.problem: str | None = None

    def step(self) -> bool:
        """Write one chunk, between two commits; return whether there was one to write.

        Raises
        ------
        ClosedError
        """
        if self.problem is not None:
            return False
        for container in self._ahead():
            if container not in self._done:
                written = False

                def write(container: int = container) -> None:
                    nonlocal written
                    written = self._write_chunk(container)

                try:
                    self._committer.run(Barrier(write))
                except OSError as error:
                    self.problem = f"stopped, a write failed ({error})"
                    logger.warning("%s: prewriting %s", self._path, self.problem)
                    return False
                return written or self.step()
        return False

    def finished(self) -> bool:
        """Say whether there is nothing left to write ahead, ever."""
        return self.problem is not None or not self._ahead()

    def _ahead(self) -> list[int]:
        """Return the containers that will be used next."""
        allocator = self._committer.allocator
        count = len(self._devices)
        while self._first < count and allocator.pool_of_container(self._first) >= 0:
            self._first += 1
        found: list[int] = []
        at = self._first
        while at < count and len(found) < AHEAD_CONTAINERS:
            if allocator.pool_of_container(at) < 0:
                found.append(at)
            at += 1
        return found

    def _write_chunk(self, container: int) -> bool:
        """Write where a container has its first hole; False where it has none, or has a pool.

        Not synced: an error that a sync reported here would be missing at a commit's.
        """
        device = self._devices[container]
        if (
            self._committer.failed is not None
            or self._committer.allocator.pool_of_container(container) >= 0
        ):
            self._done.add(container)
            return False
        start = device.first_hole(0)
        if start >= device.size_bytes:
            self._done.add(container)
            return False
        length = min(CHUNK_BYTES, device.size_bytes - start)
        device.write_at(start, memoryview(self._zeros)[:length])
        self.written_bytes += length
        return True

    def describe(self) -> str:
        """Return one sentence on what is done."""
        if self.problem is not None:
            return f"prewriting {self.problem}"
        names = ", ".join(container_name(each) for each in sorted(self._done))
        return (
            f"prewriting {AHEAD_CONTAINERS} containers ahead of their first use, while few "
            f"commits run{f'; done: {names}' if names else ''}"
        )

    def start(self) -> None:
        """Go on in a thread of its own, which ends with `stop` or with this object."""
        self._thread = threading.Thread(
            target=_go_on, args=(weakref.ref(self), self._stop), name="tablespace-prewrite"
        )
        self._thread.daemon = True
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a chunk under way is finished."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def is_busy(self) -> bool:
        """Say whether commits came since the last call, more than a few."""
        before, self._groups = self._groups, self._committer.groups
        return self._groups - before > BUSY_COMMITS


def _go_on(prewriter: weakref.ref[Prewriter], stop: threading.Event) -> None:
    """Step on until told to stop, or nothing is left; keeps nothing alive between steps."""
    pause_s = TICK_S
    while not stop.wait(pause_s):
        one = prewriter()
        if one is None or one.finished():
            return
        try:
            pause_s = TICK_S if one.is_busy() or one.step() else REST_S
        except ClosedError:
            return
        del one
