"""Chunks of an engine's blocks in files: which are there, save, load. What fails is a miss."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from kvd_connectors.gpu_direct.blocks import Blocks
from kvd_connectors.gpu_direct.choosing import choose_driver
from kvd_connectors.gpu_direct.chunking import chunk_namespace, whole_chunks
from kvd_connectors.gpu_direct.directory import LockTimeoutError, RootDirectory
from kvd_connectors.gpu_direct.errors import GpuDirectError, GpuIoError
from kvd_connectors.gpu_direct.settings import Settings
from kvd_connectors.gpu_direct.store import ChunkStore

logger = logging.getLogger(__name__)

CLOSE_WAIT_S = 10.0


@contextmanager
def _freely() -> Iterator[bool]:
    """Blocks that nobody writes over."""
    yield True


# (number of the block in the engine's cache, its key)
Pair = tuple[int, bytes]


class ChunkTier:
    """One group of layers of one rank. `save` and `load` may be called from different threads.

    Parameters
    ----------
    stores : mapping of str to ChunkStore
        By retention.
    blocks : Blocks
    chunk_blocks : int
        Blocks of a chunk.

    Raises
    ------
    GpuIoError
        The memory for chunks is refused by the driver.
    """

    def __init__(
        self, stores: Mapping[str, ChunkStore], blocks: Blocks, chunk_blocks: int
    ) -> None:
        self._stores = dict(stores)
        self._blocks = blocks
        self.chunk_blocks = chunk_blocks
        size = chunk_blocks * blocks.block_bytes
        # One each, so that a load never waits for a save.
        self._of_saves = blocks.make_memory(size)
        self._of_loads = blocks.make_memory(size)
        self._saving = threading.Lock()
        self._loading = threading.Lock()
        for store in self._stores.values():
            store.register(self._of_saves)
            store.register(self._of_loads)

    def has(self, keys: Sequence[bytes]) -> bool:
        """Say whether one whole chunk is there."""
        return any(store.has(keys) for store in self._stores.values())

    def leading_blocks(self, keys: Sequence[bytes]) -> int:
        """Return how many of a prompt's first blocks are in chunks that are there."""
        return leading_blocks(list(self._stores.values()), keys, self.chunk_blocks)

    def save(
        self,
        chunk: Sequence[Pair],
        retention: str,
        ttl_s: float | None = None,
        reading: Callable[[], AbstractContextManager[bool]] = _freely,
    ) -> bool:
        """Store one whole chunk of a prompt's blocks; say whether it is there now.

        Parameters
        ----------
        chunk : sequence of (int, bytes)
            `chunk_blocks` of them, in the prompt's order.
        retention : str
            Without a root of that retention nothing is stored.
        ttl_s : float, optional
        reading : callable
            Returns what is entered while blocks are read, and no longer; what it gives says
            whether they still may be.
        """
        store = self._stores.get(retention)
        if store is None:
            return False
        self._check(chunk)
        size = self._blocks.block_bytes
        with self._saving:
            with reading() as may_read:
                if not may_read:
                    return False
                for place, (block, _) in enumerate(chunk):
                    self._blocks.gather(block, self._of_saves, place * size)
                self._blocks.settle()
            keys = [key for _, key in chunk]
            return store.put(keys, self._of_saves, len(chunk) * size, ttl_s=ttl_s)

    def load(self, chunk: Sequence[Pair]) -> bool:
        """Copy one whole chunk into the engine's blocks; False leaves them untouched."""
        self._check(chunk)
        size = self._blocks.block_bytes
        keys = [key for _, key in chunk]
        with self._loading:
            for store in self._stores.values():
                if store.get(keys, self._of_loads) == len(chunk) * size:
                    for place, (block, _) in enumerate(chunk):
                        self._blocks.scatter(block, self._of_loads, place * size)
                    self._blocks.settle()
                    return True
        return False

    def _check(self, chunk: Sequence[Pair]) -> None:
        if len(chunk) != self.chunk_blocks:
            raise ValueError(f"{len(chunk)} blocks; a chunk has {self.chunk_blocks}")

    def status(self) -> dict[str, Any]:
        """Return each root's status, by retention."""
        return {retention: store.status() for retention, store in self._stores.items()}

    def close(self) -> None:
        """Let go of the memory; of what a hanging disk still holds after a while, not."""
        for lock in (self._saving, self._loading):
            if not lock.acquire(timeout=CLOSE_WAIT_S):
                logger.warning("chunk files: a transfer hangs; its driver stays open")
                return
        for store in self._stores.values():
            store.unregister(self._of_saves)
            store.unregister(self._of_loads)
            store.close()
        self._stores = {}


def leading_blocks(stores: Sequence[ChunkStore], keys: Sequence[bytes], chunk_blocks: int) -> int:
    """Return how many of a prompt's first blocks are in chunks that any of the stores has."""
    found = 0
    for chunk in whole_chunks(keys, chunk_blocks):
        if not any(store.appears(chunk) for store in stores):
            break
        found += len(chunk)
    return found


def open_tier(namespace: str, chunk_blocks: int, blocks: Blocks, settings: Settings) -> ChunkTier:
    """Return the tier of chunk files that the settings ask for.

    Parameters
    ----------
    namespace : str
        As of the same blocks in kvd; the length of chunks is added to it.
    chunk_blocks : int
        Blocks of a chunk.
    blocks : Blocks
    settings : Settings
        With at least one root.

    Raises
    ------
    GpuDirectError
        A root cannot be used, or KVD_AIS is 1 and no driver works.
    """
    whole = chunk_namespace(namespace, chunk_blocks)
    stores: dict[str, ChunkStore] = {}
    try:
        for retention, root in settings.roots.items():
            directory = RootDirectory(root)
            choice = choose_driver(settings.ais, directory, blocks.make_memory)
            stores[retention] = ChunkStore(
                *(directory, choice, whole),
                budget_bytes=settings.budget_bytes,
                floor_bytes=settings.floor_bytes,
            )
        return ChunkTier(stores, blocks, chunk_blocks)
    except (GpuDirectError, GpuIoError, LockTimeoutError, OSError) as error:
        for store in stores.values():
            store.close()
        if isinstance(error, GpuDirectError):
            raise
        raise GpuDirectError(f"no chunk files: {error}") from error
