"""Backends over pools of the real SGLang, without a controller around them."""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang_pools import PAGE, extra_of, fill, hashes, mha_pool, mla_pool, read, same

WAIT_S = 30


def backend_of(step: dict[str, Any], pool: Any, **config: Any) -> Any:
    """Return a backend as SGLang makes it, for a host pool."""
    about = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": True,
        "is_page_first_layout": False,
        "model_name": "parts",
        **config,
    }
    made = StorageBackendFactory.create_backend(
        "dynamic", HiCacheStorageConfig(extra_config=extra_of(step), **about), pool
    )
    made.register_mem_pool_host(pool)
    made.on_host_pools_registered()
    return made


def as_ranks_of_latent_attention(step: dict[str, Any]) -> dict[str, Any]:
    """Have two ranks with the same bytes store and load."""
    backends, pools = [], []
    for rank in range(2):
        pools.append(mla_pool(step["layout"]))
        backends.append(backend_of(step, pools[-1], is_mla_model=True, tp_rank=rank, tp_size=2))
    keys = hashes(5)
    indices, wanted = fill(pools[0], 5, 5)
    others, _ = fill(pools[1], 5, 6)
    by_second = backends[1].batch_set_v1(keys, others)
    after_second = backends[0].batch_exists(keys)
    by_first = backends[0].batch_set_v1(keys, indices)
    loaded = backends[1].batch_get_v1(keys, others)
    # One with as many ranks as it likes has the same bytes.
    alone = backend_of(step, pools[0], is_mla_model=True)
    return {
        "by_second": by_second,
        "after_second": after_second,
        "by_first": by_first,
        "loaded": loaded,
        "equal": same(wanted, read(pools[1], others)),
        "alone": alone.batch_exists(keys),
    }


def as_shards(step: dict[str, Any]) -> dict[str, Any]:
    """Have ranks that hold other bytes look for one's pages."""
    pool = mha_pool(step["layout"])
    keys = hashes(5)
    indices, _ = fill(pool, 5, 7)
    first = backend_of(step, pool, tp_rank=0, tp_size=2)
    stored = first.batch_set_v1(keys, indices)
    others = {
        "tp_rank": {"tp_rank": 1, "tp_size": 2},
        "tp_size": {"tp_rank": 0, "tp_size": 4},
        "pp_rank": {"tp_rank": 0, "tp_size": 2, "pp_rank": 1, "pp_size": 2},
        "cp_rank": {"tp_rank": 0, "tp_size": 2, "attn_cp_rank": 1, "attn_cp_size": 2},
        "model": {"tp_rank": 0, "tp_size": 2, "model_name": "other"},
        "dp_rank": {"tp_rank": 0, "tp_size": 2, "dp_rank": 1},
    }
    found = {
        name: backend_of(step, pool, **config).batch_exists(keys)
        for name, config in others.items()
    }
    salted = {**step, "kvd": {**step.get("kvd", {}), "salt": "x"}}
    found["salt"] = backend_of(salted, pool, tp_size=2).batch_exists(keys)
    found["heads"] = backend_of(step, mha_pool(step["layout"], 4), tp_size=2).batch_exists(keys)
    found["extra_key"] = first.batch_exists(hashes(5, extra_key="lora"))
    found["cache_salt"] = first.batch_exists(hashes(5, cache_salt="tenant"))
    return {"stored": stored, "found": found, "itself": first.batch_exists(keys)}


def with_other_pools(step: dict[str, Any]) -> dict[str, Any]:
    """Store and load pages of a second pool, and ask which prefixes can be restored."""
    main, draft = mha_pool(step["layout"]), mha_pool("layer_first", 1)
    backend = backend_of(step, main)
    backend.register_mem_host_pool_v2(main, PoolName.KV)
    backend.register_mem_host_pool_v2(draft, PoolName.DRAFT)
    keys = hashes(6)
    indices, _ = fill(main, 6, 8)
    assert all(backend.batch_set_v1(keys, indices))
    places, wanted = fill(draft, 6, 9)

    def transfer(count: int, policy: Any = PoolHitPolicy.ALL_PAGES, start: int = 0) -> Any:
        return PoolTransfer(
            PoolName.DRAFT,
            host_indices=places[start * PAGE : (start + count) * PAGE],
            keys=keys[start : start + count],
            hit_policy=policy,
        )

    def ask(*asked: Any) -> list[Any]:
        found = backend.batch_exists_v2(keys, list(asked))
        hits = {str(name): count for name, count in found.extra_pool_hit_pages.items()}
        return [found.kv_hit_pages, hits, found.restorable_prefix_pages]

    result: dict[str, Any] = {"nothing": ask(transfer(6))}
    # All but the third page.
    stored = [backend.batch_set_v2([transfer(2)]), backend.batch_set_v2([transfer(3, start=3)])]
    result["stored"] = [each[PoolName.DRAFT] for each in stored]
    result["all"] = ask(transfer(6))
    result["trailing"] = ask(transfer(2, PoolHitPolicy.TRAILING_PAGES))
    result["unknown"] = ask(transfer(6, PoolHitPolicy.BLOCK_GROUPS))
    draft.kv_buffer.zero_()
    loaded = backend.batch_get_v2([transfer(6)])[PoolName.DRAFT]
    result["loaded"] = loaded
    after = read(draft, places)
    result["equal"] = same(wanted[:2], after[:2])
    result["missed_is_untouched"] = not bool(after[2].any())
    stats = backend.get_stats()
    result["stats"] = [stats.prefetch_pgs, stats.backup_pgs]
    result["speeds"] = all(each > 0 for each in stats.prefetch_bandwidth + stats.backup_bandwidth)
    result["taken"] = backend.get_stats().backup_pgs
    result["cleared"] = backend.clear()
    result["after"] = backend.batch_exists(keys)
    backend.close()
    result["closed"] = backend.batch_exists(keys)
    return result


def cleared_in_vain(step: dict[str, Any]) -> dict[str, Any]:
    """Clear while no daemon answers, then go on with one that has the old pages."""
    pool = mha_pool(step["layout"])
    backend = backend_of(step, pool)
    keys = hashes(4)
    indices, _ = fill(pool, 4, 11)
    assert all(backend.batch_set_v1(keys, indices))
    wait(found=backend.batch_exists(keys))
    wait(cleared=backend.clear(), found=backend.batch_exists(keys))
    seen = set()
    deadline = time.monotonic() + WAIT_S
    while not backend.batch_set_v1(keys[:1], indices[:PAGE])[0]:
        seen.add(backend.batch_exists(keys))
        assert time.monotonic() < deadline
        time.sleep(0.05)
    seen.discard(0)
    before = backend.batch_exists(keys[1:])
    stored = backend.batch_set_v1(keys, indices)
    return {
        "seen": sorted({0, *seen}),
        "before": before,
        "stored": stored,
        "after": backend_of(step, pool).batch_exists(keys),
    }


def wait(**facts: Any) -> None:
    """Say something and wait until whoever started this did what belongs to it."""
    sys.stdout.write("RESULT " + json.dumps({"waiting": True, **facts}) + "\n")
    sys.stdout.flush()
    sys.stdin.readline()
