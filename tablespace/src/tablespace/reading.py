"""The path of a read through the store: the queue first, then slots; damage is dropped."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from typing import Any

from tablespace._core.key_index import KeyIndex, exact_key
from tablespace.commit import Committer
from tablespace.compression import Codec
from tablespace.context_pool import ContextPool
from tablespace.eviction import Eviction
from tablespace.io.device import Device
from tablespace.io.directory import Directory
from tablespace.io.read_batch import NEW_BYTES, ReadBatch
from tablespace.stats import Counts, Scrubbed
from tablespace.write_queue import WriteQueue, copy_into

logger = logging.getLogger("tablespace")

# Keys pinned at once by one call; more are read in turns.
READ_WINDOW = 4096
SCRUB_BYTES = 16 << 20


class Reads(ABC):
    """How a store finds values; a part of `Store`, whose followers go part of the way otherwise.

    Any thread may call.
    """

    _directory: Directory
    _index: KeyIndex
    _devices: list[Device]
    _slot_bytes: int
    _verify: bool
    _readers: ContextPool
    _queue: WriteQueue
    _eviction: Eviction
    _codec: Codec
    _committer: Committer
    _counts: Counts
    # Until the file system is found to have taken O_DIRECT back.
    _direct: bool

    @abstractmethod
    def _say(self, note: str) -> None:
        """Add a choice that was made after the opening, and log it."""

    def _tell_of_cache(self, call: str) -> None:
        """Say once that a file system took O_DIRECT back after the trial at open."""
        with self._counts.lock:
            told, self._direct = not self._direct, False
        if not told:
            self._say(
                f"mode buffered: O_DIRECT was refused at a later {call} (EINVAL), page cache used"
            )

    def _find(self, keys: list[bytes], buffers: list[Any] | None) -> list[Any]:
        """Return the values of keys as bytes, or their lengths in the buffers; None for a miss."""
        if self._queue.busy:
            return self._read_past_the_queue(keys, buffers)
        return self._read_slots(keys, buffers)

    def _read_past_the_queue(self, keys: list[bytes], buffers: list[Any] | None) -> list[Any]:
        """Take what waits for its commit from the queue, and read the rest."""
        queued = self._queue.find_many(keys)
        out: list[Any] = [None] * len(keys)
        rest = []
        for at, each in enumerate(queued):
            if each is None:
                rest.append(at)
            elif buffers is None or buffers[at] is NEW_BYTES:
                out[at] = each.value
            else:
                out[at] = copy_into(at, each.value, buffers[at])
        with self._counts.lock:
            self._counts.gets += len(keys) - len(rest)
            self._counts.hits += len(keys) - len(rest)
        into = None if buffers is None else [buffers[at] for at in rest]
        found = self._read_slots([keys[at] for at in rest], into)
        for at, each in zip(rest, found, strict=True):
            out[at] = each
        return out

    def _read_slots(
        self, keys: list[bytes], buffers: list[Any] | None, *, describe: bool = False
    ) -> list[Any]:
        out: list[Any] = []
        for start in range(0, len(keys), READ_WINDOW):
            part = keys[start : start + READ_WINDOW]
            into = None if buffers is None else buffers[start : start + READ_WINDOW]
            out += self._read_window(part, into, describe)
        return out

    def _batch(self) -> ReadBatch:
        return ReadBatch(self._index, self._devices, self._slot_bytes, self._verify)

    def _read_window(
        self, keys: list[bytes], buffers: list[Any] | None, describe: bool
    ) -> list[Any]:
        out, suspects = self._read_once(keys, buffers, describe)
        for key, seq in suspects:
            self._drop(key, seq)
        self._eviction.tell()
        return out

    def _read_once(
        self, keys: list[bytes], buffers: list[Any] | None, describe: bool
    ) -> tuple[list[Any], list[tuple[bytes, int]]]:
        """Return results, and (key, seq) of those whose bytes are not what they should be."""
        batch = self._batch()
        batch.codec = self._codec
        batch.describes = describe
        batch.start(keys, buffers)
        out, suspects, error = batch.run(self._readers.lending)
        if batch.cached and self._direct:
            self._tell_of_cache("read")
        with self._counts.lock:
            self._counts.gets += len(keys)
            self._counts.hits += batch.hits
            self._counts.bytes_read += batch.bytes_read
            first_error = error and not self._counts.read_errors
            self._counts.read_errors += bool(error)
        if first_error:
            logger.warning(
                "%s: a read failed (%s) and was a miss; said once, counted in read_errors",
                self._directory.path,
                os.strerror(error),
            )
        return out, suspects

    def _scrub(self, cursor: int, max_bytes: int) -> Scrubbed:
        """Read some values to see whether they are sound, see `Store.scrub`."""
        keys, following = self._index.scan(cursor, max(1, max_bytes // self._slot_bytes))
        batch = self._batch()
        batch.codec = self._codec
        batch.start(keys, None, use=False)
        _, suspects, error = batch.run(self._readers.lending)
        for key, seq in suspects:
            self._drop(key, seq)
        with self._counts.lock:
            self._counts.read_errors += bool(error)
        self._eviction.tell()
        return Scrubbed(following, len(keys), len(suspects), batch.bytes_read)

    def _drop(self, key: bytes, seq: int) -> None:
        """Forget a damaged value; its record follows in the next commit, its slot is tested."""
        with self._counts.lock:
            self._counts.corrupt += 1
        where = self._index.drop_corrupt(key, seq)
        if where is not None:
            self._committer.dropped.append((exact_key(key), *where))
            logger.warning(
                "%s: the value of key hex:%s failed its checksum or could not be read; dropped, "
                "slot %d of container %d is to be tested",
                self._directory.path,
                key.hex(),
                where[1],
                where[0],
            )
