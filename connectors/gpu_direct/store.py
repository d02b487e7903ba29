"""Chunk files of one namespace in one root: put, get, presence. A cache: it fails as a miss."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from kvd_connectors.gpu_direct.choosing import Choice
from kvd_connectors.gpu_direct.directory import (
    ENDING,
    LASTING,
    LockTimeoutError,
    RootDirectory,
    unlock_and_close,
)
from kvd_connectors.gpu_direct.errors import GpuIoError
from kvd_connectors.gpu_direct.header import (
    Header,
    HeaderError,
    OtherVersionError,
    decode,
    length_of,
    name_of,
)
from kvd_connectors.gpu_direct.ledger import Ledger
from kvd_connectors.gpu_direct.memory import ALIGNMENT, HostMemory, Memory, aligned, host_view

logger = logging.getLogger(__name__)

MAX_KNOWN = 1 << 16
"""Chunks whose headers are remembered: 16 MiB, and 8 TiB of chunks of the usual length."""
WARN_S = 60.0
"""Between two warnings of one kind: a broken disk fails every chunk."""

COUNTS = {
    "stored": "chunks stored",
    "stored_bytes": "bytes stored, headers too",
    "present": "chunks that were to be stored and were there",
    "refused_budget": "chunks not stored: the budget has no room for one of that size",
    "refused_floor": "chunks not stored: too little would be free",
    "refused_space": "chunks not stored: the disk is full",
    "refused_lock": "chunks not stored: another process held the root's lock",
    "write_errors": "chunks not stored: the transfer or the disk failed",
    "hits": "chunks read",
    "hit_bytes": "bytes of payload read",
    "misses": "chunks asked for that are not there",
    "expired": "chunks that were there and past their time",
    "read_errors": "chunks that could not be read; the file stays",
    "damaged": "chunks that were not what they should be; the file is removed",
    "other_version": "chunks of another version of the format; the file stays",
    "evicted": "chunks removed to make room",
    "evicted_bytes": "bytes of them",
    "leftovers_removed": "files of writers that ended while they wrote",
}


class ChunkStore:
    """Stores and reads chunks. Every method may be called from any thread.

    Parameters
    ----------
    directory : RootDirectory
    choice : Choice
        The driver, which has been tried out there.
    namespace : str
        What makes bytes under equal keys mean the same.
    budget_bytes : int or None
        Of all chunk files in the root, of whatever namespace and process; None for half of what
        is free there and what it holds.
    floor_bytes : int
        What is left free of the file system.
    clock : callable
        Seconds since the epoch.

    Notes
    -----
    Durability: the file is synced before it gets its name, its name is not. After a power cut a
    chunk is whole or absent; what a disk loses in spite of the sync, length and checksums tell.
    """

    def __init__(
        self,
        directory: RootDirectory,
        choice: Choice,
        namespace: str,
        *,
        budget_bytes: int | None = None,
        floor_bytes: int = 0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._directory = directory
        self._choice = choice
        self._driver = choice.driver
        self._namespace = namespace
        self._clock = clock
        self._mutex = threading.Lock()
        self._warned: dict[str, float] = {}
        # Of chunks whose header was read: (inode, time of change), when it ends.
        self._known: dict[str, tuple[tuple[int, int], int]] = {}
        self._counts: Counter[str] = Counter()
        self._of_ledger: Counter[str] = Counter()
        self.floor_bytes = floor_bytes
        with directory.locked():
            held = Ledger(directory, 1, 0, self._of_ledger).look()
            self.budget_bytes = budget_bytes or _half(directory, held)
            self._ledger = Ledger(directory, self.budget_bytes, floor_bytes, self._of_ledger)
        logger.info(
            "chunk files in %s: %d bytes held, of a budget of %d; %d stay free",
            *(directory.root, held, self.budget_bytes, floor_bytes),
        )

    # -- memory --------------------------------------------------------------------------------

    def register(self, memory: Memory) -> None:
        """Take memory into use; GpuIoError where the driver refuses it."""
        self._driver.register(memory)

    def unregister(self, memory: Memory) -> None:
        """Let go of memory."""
        self._driver.unregister(memory)

    def close(self) -> None:
        """End the driver; the files stay."""
        with contextlib.suppress(GpuIoError):
            self._driver.close()

    # -- chunks --------------------------------------------------------------------------------

    def put(
        self,
        keys: Sequence[bytes],
        memory: Memory,
        payload_bytes: int,
        *,
        ttl_s: float | None = None,
    ) -> bool:
        """Store a chunk; say whether it is there now.

        Parameters
        ----------
        keys : sequence of bytes
            Of the blocks in it, in order.
        memory : Memory
            Registered; the payload is at its start. What follows up to a multiple of ALIGNMENT is
            zeroed.
        payload_bytes : int
        ttl_s : float, optional
            After which it is a miss.
        """
        if not 0 < payload_bytes <= memory.size_bytes:
            raise ValueError(f"{payload_bytes} bytes of memory of {memory.size_bytes}")
        if self.has(keys):
            self._count("present")
            return True
        padded = aligned(payload_bytes)
        memory.zero(payload_bytes, padded)
        expires = 0 if ttl_s is None else max(1, int(self._clock() + ttl_s))
        checksum = memory.checksum(padded)
        header = Header(self._namespace, tuple(keys), payload_bytes, checksum, expires)
        try:
            return self._store(name_of(self._namespace, keys), header, memory)
        except LockTimeoutError as error:
            return self._refuse("refused_lock", str(error))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            return self._refuse("refused_space" if full else "write_errors", str(error))
        except GpuIoError as error:
            full = error.code in (errno.ENOSPC, errno.EDQUOT)
            return self._refuse("refused_space" if full else "write_errors", str(error))

    def _store(self, name: str, header: Header, memory: Memory) -> bool:
        size = header.file_bytes
        with self._directory.locked():
            if reason := self._ledger.make_room(size):
                return self._refuse(f"refused_{reason}", f"{size} bytes have no room")
            self._ledger.add(size)
            try:
                fd, temporary = self._directory.create(
                    *(name, size, self._driver.open_flags),
                    mode=ENDING if header.expires_at_s else LASTING,
                )
            except BaseException:
                self._ledger.add(-size)
                raise
        try:
            try:
                self._fill(fd, header, memory)
                # The lock on the file lasts until it has its name: until then it is being written.
                with self._directory.locked():
                    replaced = self._directory.place(temporary, name)
                    self._ledger.add(-replaced)
            finally:
                unlock_and_close(fd)
        except BaseException:
            self._take_away(temporary, size)
            raise
        self._count("stored")
        self._count("stored_bytes", size)
        return True

    def _fill(self, fd: int, header: Header, memory: Memory) -> None:
        """Write the payload, then the header, then see both to the disk."""
        with self._driver.file(fd) as file:
            file.write(memory, aligned(header.payload_bytes), header.size_bytes)
        first = HostMemory(header.size_bytes)
        first.view[:] = header.encode()
        if os.pwrite(fd, first.view, 0) != header.size_bytes:
            raise OSError(errno.EIO, "a header was written in part")
        os.fdatasync(fd)

    def _take_away(self, temporary: Any, size: int) -> None:
        """Remove a file that did not become a chunk; a later look counts what cannot be now."""
        with contextlib.suppress(OSError, LockTimeoutError), self._directory.locked():
            temporary.unlink()
            self._ledger.add(-size)

    def has(self, keys: Sequence[bytes]) -> bool:
        """Say whether a chunk is there, by its whole header; its payload is not looked at.

        A file whose header was read is known by inode and time of change: asking again is one
        call of the system.
        """
        name = name_of(self._namespace, keys)
        status = self._directory.look_at(name)
        if status is None:
            return False
        known = self._known.get(name)
        seen = (status.st_ino, status.st_mtime_ns)
        if known is None or known[0] != seen:
            header = self._header_of(name)
            if header is None or not self._is_of(header, keys):
                return False
            known = seen, header.expires_at_s
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            self._known[name] = known
        return not known[1] or self._clock() < known[1]

    def appears(self, keys: Sequence[bytes]) -> bool:
        """Say whether there seems to be a chunk: one call of the system, no read of the disk.

        Its header is looked at by who loads it; only one with a time to live is opened for that.
        """
        status = self._directory.look_at(name_of(self._namespace, keys))
        if status is None:
            return False
        if stat.S_IMODE(status.st_mode) != LASTING:
            return self.has(keys)
        return status.st_size >= 2 * ALIGNMENT

    def _header_of(self, name: str) -> Header | None:
        """Return the header of a chunk's file, None where there is none that holds."""
        try:
            fd = self._directory.open_chunk(name, 0)
        except OSError:
            return None
        try:
            return self._header(fd)
        except (OSError, HeaderError, OtherVersionError):
            return None
        finally:
            os.close(fd)

    def get(self, keys: Sequence[bytes], memory: Memory) -> int | None:
        """Read a chunk to the start of registered memory; return its length, None for a miss.

        After a miss the memory holds anything.
        """
        name = name_of(self._namespace, keys)
        try:
            fd = self._directory.open_chunk(name, self._driver.open_flags)
        except FileNotFoundError:
            self._count("misses")
            return None
        except OSError as error:
            self._warn("read_errors", str(error))
            return None
        try:
            return self._read(fd, name, keys, memory)
        except OtherVersionError as error:
            self._warn("other_version", f"{name}: {error}")
        except HeaderError as error:
            self._discard(fd, name, str(error))
        except (OSError, GpuIoError) as error:
            self._warn("read_errors", f"{name}: {error}")
        finally:
            os.close(fd)
        return None

    def _read(self, fd: int, name: str, keys: Sequence[bytes], memory: Memory) -> int | None:
        header = self._header(fd)
        if not self._is_of(header, keys):
            raise HeaderError("it is of another namespace or other keys")
        if self._is_over(header):
            self._count("expired")
            self._remove(fd, name)
            return None
        padded = aligned(header.payload_bytes)
        if padded > memory.size_bytes:
            words = f"a chunk of {header.payload_bytes} bytes, memory of {memory.size_bytes}"
            raise GpuIoError("get", errno.EMSGSIZE, words)
        with self._driver.file(fd) as file:
            file.read(memory, padded, header.size_bytes)
        if memory.checksum(padded) != header.checksum:
            raise HeaderError("the payload's checksum differs")
        with contextlib.suppress(OSError):
            os.utime(fd)  # It was used: the time of change is what eviction goes by.
        self._count("hits")
        self._count("hit_bytes", header.payload_bytes)
        return header.payload_bytes

    def delete(self, keys: Sequence[bytes]) -> bool:
        """Remove a chunk; say whether one was there."""
        name = name_of(self._namespace, keys)
        try:
            fd = self._directory.open_chunk(name, 0)
        except OSError:
            return False
        try:
            return self._remove(fd, name)
        finally:
            os.close(fd)

    def clear(self) -> int:
        """Remove every chunk of this namespace; return how many."""
        removed = 0
        for found in self._directory.find_chunks():
            name = found.path.stem
            try:
                fd = self._directory.open_chunk(name, 0)
            except OSError:
                continue
            try:
                if self._header(fd).namespace == self._namespace:
                    removed += self._remove(fd, name)
            except (OSError, HeaderError, OtherVersionError):
                continue
            finally:
                os.close(fd)
        return removed

    # -- what is known -------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """Return what was chosen, what is held, and every count of COUNTS."""
        with self._directory.locked():
            used = self._ledger.used_bytes
        with self._mutex:
            counted = self._counts + self._of_ledger
        return {
            "root": str(self._directory.root),
            "namespace": self._namespace,
            "driver": self._driver.name,
            "not_chosen": list(self._choice.reasons),
            "budget_bytes": self.budget_bytes,
            "floor_bytes": self.floor_bytes,
            "used_bytes": used,
            **{name: counted[name] for name in COUNTS},
        }

    # -- parts ---------------------------------------------------------------------------------

    def _header(self, fd: int) -> Header:
        """Read and check a file's header."""
        first = HostMemory(ALIGNMENT)
        count = os.preadv(fd, [first.view], 0)
        size = length_of(bytes(first.view[:count]))
        whole = bytes(first.view)
        if size > ALIGNMENT:
            rest = HostMemory(size - ALIGNMENT)
            count = os.preadv(fd, [host_view(rest.pointer, size - ALIGNMENT)], ALIGNMENT)
            whole += bytes(rest.view[:count])
        return decode(whole, os.fstat(fd).st_size)

    def _is_of(self, header: Header, keys: Sequence[bytes]) -> bool:
        return header.namespace == self._namespace and header.keys == tuple(keys)

    def _is_over(self, header: Header) -> bool:
        return bool(header.expires_at_s) and self._clock() >= header.expires_at_s

    def _discard(self, fd: int, name: str, why: str) -> None:
        """Remove a file that is not what it should be: nobody is to meet it again."""
        self._warn("damaged", f"{name}: {why}; the file is removed")
        self._remove(fd, name)

    def _remove(self, fd: int, name: str) -> bool:
        """Remove the open file under a name, if it still is the one."""
        path = self._directory.path_of(name)
        opened = os.fstat(fd)
        try:
            with self._directory.locked():
                found = path.lstat()
                if (found.st_dev, found.st_ino) != (opened.st_dev, opened.st_ino):
                    return False
                path.unlink()
                self._ledger.add(-found.st_size)
        except (OSError, LockTimeoutError):
            return False
        return True

    def _refuse(self, name: str, why: str) -> bool:
        self._warn(name, why)
        return False

    def _count(self, name: str, count: int = 1) -> None:
        with self._mutex:
            self._counts[name] += count

    def _warn(self, name: str, words: str) -> None:
        """Count what went wrong, and say it now and then."""
        self._count(name)
        now = time.monotonic()
        with self._mutex:
            if now - self._warned.get(name, -WARN_S) < WARN_S:
                return
            self._warned[name] = now
        logger.warning("%s: %s: %s", self._directory.root, COUNTS[name], words)


def _half(directory: RootDirectory, held: int) -> int:
    """Return half of what is free and what is held: the same after a restart as before it."""
    found = os.statvfs(directory.path)
    return (found.f_bavail * found.f_frsize + held) // 2
