"""`KvdHiCacheStorage`: SGLang's hierarchical cache over kvd.

Given to SGLang as ``--hicache-storage-backend dynamic`` with
``--hicache-storage-backend-extra-config`` ::

    {"backend_name": "kvd", "module_path": "kvd_connectors.sglang",
     "class_name": "KvdHiCacheStorage", "interface_v1": 1, "kvd": {"socket": "/run/kvd/kvd.sock"}}
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorage,
    HiCacheStorageConfig,
    HiCacheStorageExtraInfo,
    PoolTransfer,
    PoolTransferResult,
)

from kvd_connectors.sglang.facts import MAIN, is_writer
from kvd_connectors.sglang.kept import KeptPages
from kvd_connectors.sglang.keys import keys_of
from kvd_connectors.sglang.options import read_options
from kvd_connectors.sglang.pools import KeptPools
from kvd_connectors.sglang.restorable import ALL_PAGES, TRAILING_PAGES, restorable

logger = logging.getLogger(__name__)
Call = TypeVar("Call", bound=Callable[..., Any])


def harmless(miss: Callable[..., Any]) -> Callable[[Call], Call]:
    """Have a call that fails for whatever reason say so in the log and return a miss.

    `miss` makes it of the call's arguments.
    """

    def wrap(call: Call) -> Call:
        @functools.wraps(call)
        def harmless_call(self: Any, *arguments: Any, **options: Any) -> Any:
            try:
                return call(self, *arguments, **options)
            except Exception:
                logger.exception("%s failed: taken as a miss", call.__name__)
                return miss(*arguments, **options)

        return harmless_call  # type: ignore[return-value]

    return wrap


def _none_of(keys: list[str], *_: Any, **__: Any) -> list[bool]:
    return [False] * len(keys)


def _no_tensors(keys: list[str], *_: Any, **__: Any) -> list[None]:
    return [None] * len(keys)


def _no_pool(transfers: list[PoolTransfer], *_: Any, **__: Any) -> dict[str, list[bool]]:
    return {each.name: [False] * len(each.keys or []) for each in transfers}


class KvdHiCacheStorage(HiCacheStorage):
    """Keeps an engine's pages in kvd, by the engine's own page hashes.

    A cache and nothing else: without a daemon every look-up misses, every wait is bounded, and
    nothing is raised into the engine. Settings: `kvd_connectors.sglang.options.Options`.

    Notes
    -----
    SGLang calls it from a thread that looks up, one that loads and one that stores, at the same
    time.
    """

    def __init__(self, storage_config: HiCacheStorageConfig, kwargs: Any = None) -> None:
        extra = storage_config.extra_config or {}
        self._config = storage_config
        self._is_in_place = bool(extra.get("interface_v1"))
        self._pools = KeptPools(storage_config, read_options(extra))
        self._has_metrics = bool(getattr(storage_config, "enable_storage_metrics", False))
        self._said: set[str] = set()
        self.counts = self._pools.counts
        if not self._is_in_place:
            logger.info(
                "without interface_v1 SGLang copies each page once more; "
                'remedy: "interface_v1": 1 in its extra configuration'
            )

    # -- pools ---------------------------------------------------------------------------------

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the main host pool into use."""
        super().register_mem_pool_host(mem_pool_host)
        self._pools.close()
        if self._has_no_bytes():
            logger.info("the main pool has no bytes of its own: other pools carry them")
        else:
            self._pools.add_main(mem_pool_host)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take another host pool into use."""
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        self._pools.add(str(host_pool_name), host_pool)

    def _has_no_bytes(self) -> bool:
        """Say whether the main pool counts tokens only, and others hold what belongs to them."""
        return getattr(self.mem_pool_host, "kv_buffer", self) is None

    # -- what the main pool's pages are asked and handed by ------------------------------------

    @harmless(lambda *_, **__: 0)
    def batch_exists(
        self, keys: list[str], extra_info: HiCacheStorageExtraInfo | None = None
    ) -> int:
        """Return how many leading pages there are."""
        kept = self._pools.get(MAIN) if self._is_in_place else self._pools.flat
        if kept is None or not self._pools.is_open():
            return 0
        self.counts.add("lookups")
        found = kept.leading(keys_of(keys))
        self.counts.add("pages_found", found)
        return found

    @harmless(lambda *_, **__: False)
    def exists(self, key: str) -> bool:
        """Say whether there is a page."""
        return self.batch_exists([key]) == 1

    @harmless(_none_of)
    def batch_get_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Copy pages into the host pool; return which were."""
        if self._has_no_bytes():
            return [True] * len(keys)
        return self._load(self._pools.get(MAIN), keys, host_indices)

    @harmless(_none_of)
    def batch_set_v1(
        self,
        keys: list[str],
        host_indices: torch.Tensor,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> list[bool]:
        """Store pages of the host pool; return which are there afterwards."""
        if self._has_no_bytes():
            return [True] * len(keys)
        return self._save(MAIN, self._pools.get(MAIN), keys, host_indices)

    @harmless(lambda *_, **__: None)
    def get(
        self, key: str, target_location: Any = None, target_sizes: Any = None
    ) -> torch.Tensor | None:
        """Copy a page into a tensor and return it; None for a miss."""
        if target_location is None:
            target_location = self.mem_pool_host.get_dummy_flat_data_page()
        return self.batch_get([key], [target_location])[0]

    @harmless(_no_tensors)
    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[torch.Tensor | None]:
        """Copy pages into tensors and return those; None for each miss."""
        if target_locations is None:
            return [None] * len(keys)
        loaded = self._load(self._pools.flat, keys, target_locations)
        return [
            target if there else None
            for target, there in zip(target_locations, loaded, strict=True)
        ]

    @harmless(lambda *_, **__: False)
    def set(
        self,
        key: str,
        value: Any = None,
        target_location: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store a page; say whether it is there afterwards."""
        return self.batch_set([key], [value])

    @harmless(lambda *_, **__: False)
    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        """Store pages; say whether all are there afterwards."""
        if values is None:
            return False
        pages = [value.contiguous() for value in values]
        return all(self._save(MAIN, self._pools.flat, keys, pages))

    # -- other pools ---------------------------------------------------------------------------

    @harmless(lambda *_, **__: PoolTransferResult.empty())
    def batch_exists_v2(
        self,
        keys: list[str],
        pool_transfers: list[PoolTransfer] | None = None,
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> PoolTransferResult:
        """Return which prefixes can be restored, by what each pool has."""
        is_bare = self._has_no_bytes()
        count = len(keys) if is_bare else self.batch_exists(keys, extra_info)
        hits: dict[Any, int] = {MAIN: count} if count else {}
        lengths = list(range(1, count + 1))
        wanted = keys_of(keys[:count])
        for transfer in pool_transfers or []:
            policy = str(getattr(transfer.hit_policy, "value", transfer.hit_policy))
            if policy not in (ALL_PAGES, TRAILING_PAGES):
                # SGLang's rule: a pool that is not reported on has no say.
                self._say_once(f"pool {transfer.name} has the policy {policy}: not looked up")
                continue
            is_bare = False
            kept = self._pools.get(str(transfer.name))
            if kept is not None and wanted and self._pools.is_open():
                present = kept.present(wanted)
            else:
                present = [False] * count
            found = restorable(present, policy, max(1, len(transfer.keys or ())))
            if found:
                hits[transfer.name] = found[-1]
            lengths = sorted(set(lengths) & set(found))
        if is_bare:
            # Nobody vouches for these pages.
            return PoolTransferResult.empty()
        return PoolTransferResult(lengths[-1] if lengths else 0, hits, lengths)

    @harmless(_no_pool)
    def batch_get_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Copy pages into other pools; return which were, by pool."""
        return {
            each.name: self._load(
                self._pools.get(str(each.name)), each.keys or [], each.host_indices
            )
            for each in transfers
        }

    @harmless(_no_pool)
    def batch_set_v2(
        self,
        transfers: list[PoolTransfer],
        extra_info: HiCacheStorageExtraInfo | None = None,
    ) -> dict[str, list[bool]]:
        """Store pages of other pools; return which are there afterwards, by pool."""
        return {
            each.name: self._save(
                str(each.name),
                self._pools.get(str(each.name)),
                each.keys or [],
                each.host_indices,
            )
            for each in transfers
        }

    # -- all of it -----------------------------------------------------------------------------

    def clear(self) -> bool:
        """Remove what is stored of this engine's kind; say whether that worked.

        Until it has, nothing is found: the weights may have changed.
        """
        return self._pools.clear()

    def get_stats(self) -> Any:
        """Return pages and bandwidths since the last call, as SGLang's metrics want them."""
        if not self._has_metrics:
            return None
        from sglang.srt.observability.metrics_collector import StorageMetrics

        loads, saves = self._pools.speeds.take("load"), self._pools.speeds.take("save")
        return StorageMetrics(
            prefetch_pgs=[pages for pages, _ in loads],
            backup_pgs=[pages for pages, _ in saves],
            prefetch_bandwidth=[speed for _, speed in loads],
            backup_bandwidth=[speed for _, speed in saves],
        )

    def close(self) -> None:
        """Leave the daemon."""
        self._pools.close()
        logger.info("KvdHiCacheStorage did: %s", dict(self.counts.total))

    # -- inside --------------------------------------------------------------------------------

    def _load(self, kept: KeptPages | None, keys: list[str], where: Any) -> list[bool]:
        if kept is None or not keys or not self._pools.is_open():
            return [False] * len(keys)
        return kept.load(keys_of(keys), where)

    def _save(
        self, pool_name: str, kept: KeptPages | None, keys: list[str], where: Any
    ) -> list[bool]:
        pool = getattr(self, "registered_pools", {}).get(pool_name)
        if not is_writer(self._config, pool, pool_name):
            # Another rank stores the same bytes.
            return [True] * len(keys)
        if kept is None or not keys or not self._pools.is_open():
            return [False] * len(keys)
        return kept.save(keys_of(keys), where)

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            logger.warning(text)
