"""Chunks of an engine's blocks in files: which are there, save, load. What fails is a miss."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from kvd_connectors.gpu_direct.blocks import Blocks
from kvd_connectors.gpu_direct.choosing import choose_driver
from kvd_connectors.gpu_direct.chunking import blocks_per_chunk, whole_chunks
from kvd_connectors.gpu_direct.directory import LockTimeoutError, RootDirectory
from kvd_connectors.gpu_direct.errors import GpuDirectError, GpuIoError
from kvd_connectors.gpu_direct.settings import Settings, read_settings
from kvd_connectors.gpu_direct.store import ChunkStore

logger = logging.getLogger(__name__)

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

    def leading_blocks(self, keys: Sequence[bytes]) -> int:
        """Return how many of a prompt's first blocks are in chunks that are there."""
        found = 0
        for chunk in whole_chunks(keys, self.chunk_blocks):
            if not any(store.has(chunk) for store in self._stores.values()):
                break
            found += len(chunk)
        return found

    def save(self, chunk: Sequence[Pair], retention: str, ttl_s: float | None = None) -> bool:
        """Store one whole chunk of a prompt's blocks; say whether it is there now.

        Parameters
        ----------
        chunk : sequence of (int, bytes)
            `chunk_blocks` of them, in the prompt's order.
        retention : str
            Without a root of that retention nothing is stored.
        ttl_s : float, optional
        """
        store = self._stores.get(retention)
        if store is None:
            return False
        self._check(chunk)
        size = self._blocks.block_bytes
        with self._saving:
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
        """Let go of the memory."""
        with self._saving, self._loading:
            for store in self._stores.values():
                store.unregister(self._of_saves)
                store.unregister(self._of_loads)
                store.close()
            self._stores = {}


def open_tier(
    namespace: str,
    block_tokens: int,
    blocks: Blocks,
    settings: Settings | None = None,
) -> ChunkTier | None:
    """Return the tier of chunk files that the environment asks for, or None.

    Parameters
    ----------
    namespace : str
        As of the same blocks in kvd; the tokens of a chunk are added to it.
    block_tokens : int
    blocks : Blocks
    settings : Settings, optional
        Instead of the environment's.

    Raises
    ------
    GpuDirectError
        A variable is wrong, or KVD_AIS is 1 and no driver works. With KVD_AIS at auto or 0, a root
        that cannot be used is an error too: there were never to be no files without a word.
    """
    settings = read_settings() if settings is None else settings
    if not settings.is_on:
        return None
    chunk_blocks = blocks_per_chunk(settings.chunk_tokens, block_tokens, blocks.block_bytes)
    whole = f"{namespace}/chunk-{chunk_blocks * block_tokens}"
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
