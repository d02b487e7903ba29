"""Chunk files under vLLM's connector: the same plan in units of chunks, past the daemon.

`chunk_files` says whether the environment asks for them. What the connector does then is what it
does otherwise, with three parts replaced: presence is asked of the files, and the threads that
save and load move whole chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from kvd_connectors.gpu_direct.blocks import Blocks, HostBlocks
from kvd_connectors.gpu_direct.choosing import Choice
from kvd_connectors.gpu_direct.chunking import blocks_per_chunk, chunk_namespace
from kvd_connectors.gpu_direct.directory import LockTimeoutError, RootDirectory
from kvd_connectors.gpu_direct.errors import GpuDirectError
from kvd_connectors.gpu_direct.posix_driver import PosixDriver
from kvd_connectors.gpu_direct.settings import Settings, read_settings
from kvd_connectors.gpu_direct.store import ChunkStore
from kvd_connectors.gpu_direct.tier import ChunkTier, leading_blocks, open_tier
from kvd_connectors.vllm.counts import Counts
from kvd_connectors.vllm.loading import Loader
from kvd_connectors.vllm.plan import Plan
from kvd_connectors.vllm.saving import Save, Saver
from kvd_connectors.vllm.transfer import Pair

if TYPE_CHECKING:
    from kvd_connectors.vllm.pages import Pages

logger = logging.getLogger(__name__)

# vLLM's names of caches whose requests keep every block to their end, each layer of one size.
WHOLE = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec")


@dataclass(frozen=True)
class ChunkFiles:
    """What the environment asks for, for one engine.

    Attributes
    ----------
    settings : Settings
    plan : Plan
        The engine's, its unit a chunk.
    chunk_blocks : int
    """

    settings: Settings
    plan: Plan
    chunk_blocks: int

    def presence(self) -> PresenceClient:
        """Return what the scheduler asks instead of the daemon."""
        return PresenceClient(self.settings, self.chunk_blocks)

    def open(
        self,
        pages: Pages,
        namespace: str,
        counts: Counts,
        limit_bytes: int,
        settle: Callable[[], None],
    ) -> tuple[ChunkSaver, ChunkLoader]:
        """Return what a worker saves and loads with; closing the loader closes the files."""
        tier = open_tier(namespace, self.chunk_blocks, blocks_of(pages), self.settings)
        saver = ChunkSaver(tier, pages, counts, limit_bytes)
        return saver, ChunkLoader(tier, pages, counts, settle)


def chunk_files(
    plan: Plan,
    kv_cache_config: Any,
    settings: Settings | None = None,
    *,
    stages: int = 1,
) -> ChunkFiles | None:
    """Return what the environment asks for, None where that is nothing, or cannot be.

    Parameters
    ----------
    plan : Plan
    kv_cache_config : KVCacheConfig
        vLLM's, for how many bytes a block has.
    settings : Settings, optional
        Instead of the environment's.
    stages : int
        Of pipeline parallelism.

    Raises
    ------
    GpuDirectError
        A variable is wrong; or KVD_AIS is 1 and this engine's cache cannot be cut into chunks.
    """
    settings = read_settings() if settings is None else settings
    if not settings.is_on or not plan.groups:
        return None
    if problem := _why_not(plan, kv_cache_config, stages):
        if settings.ais == "1":
            raise GpuDirectError(
                f"KVD_AIS is 1 and there can be no chunk files: {problem}. Remedy: leave out "
                "KVD_AIS and KVD_HIPFILE_ROOTS"
            )
        logger.warning("no chunk files: %s; its blocks go through the daemon", problem)
        return None
    (group,) = plan.groups
    spec = kv_cache_config.kv_cache_groups[group.number].kv_cache_spec
    block_bytes = spec.page_size_bytes * max(1, len(group.layers))
    each = plan.unit_tokens // group.block_tokens
    units = blocks_per_chunk(settings.chunk_tokens, plan.unit_tokens, block_bytes * each)
    chunked = msgspec.structs.replace(plan, unit_tokens=plan.unit_tokens * units)
    logger.info(
        "KvdConnector: chunk files of %d tokens in %s, past the daemon",
        chunked.unit_tokens,
        ", ".join(f"{name}={path}" for name, path in settings.roots.items()),
    )
    return ChunkFiles(settings, chunked, units * each)


def _why_not(plan: Plan, kv_cache_config: Any, stages: int) -> str:
    """Return what keeps an engine's blocks from being cut into chunks, or an empty string."""
    if len(plan.groups) != 1 or not plan.single:
        return f"this engine's cache has {len(kv_cache_config.kv_cache_groups)} groups of layers"
    if stages > 1:
        # Scheduler and workers would count a chunk's blocks by different layers.
        return "under pipeline parallelism ranks have different layers"
    spec = kv_cache_config.kv_cache_groups[plan.groups[0].number].kv_cache_spec
    kind = type(spec).__name__
    if kind not in WHOLE:
        # A window's blocks are given up one by one while the request runs.
        return f"its blocks are of {kind}, of which not all stay while a request runs"
    return ""


def blocks_of(pages: Pages) -> Blocks:
    """Return an engine's blocks for where they lie."""
    if pages.on_host:
        return HostBlocks(pages)
    from kvd_connectors.gpu_direct.tensor_blocks import TensorBlocks

    return TensorBlocks(pages.rows)


class PresenceClient:
    """As much of `kvd.Client` as the scheduler's side uses, asked of chunk files."""

    def __init__(self, settings: Settings, chunk_blocks: int) -> None:
        self._settings = settings
        self._chunk_blocks = chunk_blocks

    def namespace(self, name: str) -> Presence:
        """Return the chunks of one namespace."""
        # Nothing is transferred here: no driver is started in the scheduler's process.
        choice = Choice(PosixDriver(direct=False), ())
        whole = chunk_namespace(name, self._chunk_blocks)
        try:
            stores = [
                ChunkStore(
                    *(RootDirectory(root), choice, whole),
                    budget_bytes=self._settings.budget_bytes,
                    floor_bytes=self._settings.floor_bytes,
                )
                for root in self._settings.roots.values()
            ]
        except (LockTimeoutError, OSError) as error:
            raise GpuDirectError(f"no chunk files: {error}") from error
        return Presence(stores, self._chunk_blocks)

    def close(self) -> None:
        """Nothing is open."""


class Presence:
    """Chunks of one namespace, as the scheduler's side asks for blocks."""

    def __init__(self, stores: list[ChunkStore], chunk_blocks: int) -> None:
        self._stores = stores
        self._chunk_blocks = chunk_blocks

    def match_prefix(self, keys: Sequence[bytes]) -> int:
        """Return how many leading blocks seem to be there; the first one begins a chunk."""
        return leading_blocks(self._stores, keys, self._chunk_blocks)

    def local_lookup(self) -> None:
        """Nothing is known without asking."""

    def clear(self) -> None:
        """Remove every chunk of the namespace."""
        for store in self._stores:
            store.clear()


class ChunkSaver(Saver):
    """Saves whole chunks; blocks are held while they are gathered, not while they are written."""

    def __init__(self, tier: ChunkTier, pages: Pages, counts: Counts, limit_bytes: int) -> None:
        super().__init__([pages], [], None, counts, limit_bytes)
        self._tier = tier

    def _save(self, save: Save) -> None:
        for chunk in _chunks(save.transfer.pairs, self._tier.chunk_blocks):
            self._save_chunk(save, chunk)

    def _save_chunk(self, save: Save, chunk: list[Pair]) -> None:
        if self._tier.has([key for _, key in chunk]):
            self._counts.add("blocks_present", len(chunk))
            return
        keep = save.transfer.keep
        is_there = self._tier.save(
            chunk, keep.retention, keep.ttl_s, reading=lambda: _reading(save)
        )
        if not is_there:
            self._counts.add("blocks_unsaved", len(chunk))
            return
        self._counts.add("blocks_saved", len(chunk))
        self._counts.add("bytes_saved", len(chunk) * self._pages[0].block_bytes)


@contextmanager
def _reading(save: Save) -> Iterator[bool]:
    with save.lock:
        yield not save.is_void


class ChunkLoader(Loader):
    """Loads whole chunks: all blocks of one, or none and they are reported."""

    def __init__(
        self, tier: ChunkTier, pages: Pages, counts: Counts, settle: Callable[[], None]
    ) -> None:
        super().__init__([pages], [], None, counts, settle)
        self._tier = tier

    def _load_group(self, number: int, pairs: list[Pair]) -> set[int]:
        failed: set[int] = set()
        for chunk in _chunks([pairs], self._tier.chunk_blocks):
            if self._tier.load(chunk):
                self._counts.add("blocks_loaded", len(chunk))
                self._counts.add("bytes_loaded", len(chunk) * self._pages[0].block_bytes)
            else:
                failed.update(block for block, _ in chunk)
        return failed

    def close(self) -> None:
        """End the thread once it is through; the worker closes this after its saver."""
        super().close()
        self._tier.close()


def _chunks(groups: list[list[Pair]], blocks: int) -> list[list[Pair]]:
    """Cut the one group's blocks into chunks; transfers are in units of them."""
    (pairs,) = groups
    if len(pairs) % blocks:
        raise ValueError(f"{len(pairs)} blocks are no whole chunks of {blocks}")
    return [pairs[first : first + blocks] for first in range(0, len(pairs), blocks)]
