"""Parts of the real SGLang over kvd, in one process: its controller, its tree, its pools.

Argument: {"socket": PATH, "steps": [{"do": NAME, ...}, ...]}; prints a line of JSON for each step.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from array import array
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed
from sglang.srt.managers.cache_controller import HiCacheController
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.hicache_storage import (
    HiCacheStorageConfig,
    PoolHitPolicy,
    PoolName,
    PoolTransfer,
)
from sglang.srt.mem_cache.memory_pool import (
    MHATokenToKVPool,
    MLATokenToKVPool,
    ReqToTokenPool,
)
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.storage import StorageBackendFactory
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

PAGE, LAYERS, HEADS, DIM = 16, 3, 2, 32
TOKENS = 1024
WAIT_S = 30
IO = {
    "layer_first": "direct",
    "page_first": "kernel",
    "page_first_direct": "direct",
    "page_head": "kernel",
}
GIVEN = json.loads(sys.argv[1]) if len(sys.argv) > 1 else {}
RANKS = {
    "tp_rank": 0,
    "tp_size": 1,
    "pp_rank": 0,
    "pp_size": 1,
    "attn_tp_rank": 0,
    "attn_tp_size": 1,
    "attn_dcp_size": 1,
    "attn_dcp_rank": 0,
}


def extra_of(step: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's extra configuration for a step."""
    extra: dict[str, Any] = {
        "backend_name": "kvd",
        "module_path": "kvd_connectors.sglang",
        "class_name": "KvdHiCacheStorage",
        "kvd": {"socket": GIVEN["socket"], "digests": True, **step.get("kvd", {})},
    }
    if step["v1"]:
        extra["interface_v1"] = 1
    return extra


def device_pool(step: dict[str, Any]) -> tuple[Any, Any]:
    """Return a device pool and its allocator."""
    dtype = getattr(torch, step.get("dtype", "float32"))
    pool = MHATokenToKVPool(
        size=TOKENS,
        page_size=PAGE,
        dtype=dtype,
        head_num=HEADS,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    allocator = PagedTokenToKVPoolAllocator(
        TOKENS, page_size=PAGE, dtype=dtype, device="cpu", kvcache=pool, need_sort=False
    )
    return pool, allocator


@contextmanager
def controller(step: dict[str, Any]) -> Any:
    """Give a controller with its host pool."""
    pool, allocator = device_pool(step)
    about = pool._mha_buffer_info()
    host = get_mha_host_pool_cls(about)(
        about,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE,
        layout=step["layout"],
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
    )
    made = HiCacheController(
        allocator,
        host,
        PAGE,
        tp_group=torch.distributed.group.WORLD,
        load_cache_event=threading.Event(),
        write_policy="write_through",
        io_backend="direct",
        storage_backend="dynamic",
        prefetch_threshold=PAGE,
        model_name="tiny/llama",
        storage_backend_extra_config=extra_of(step),
    )
    try:
        yield made, host
    finally:
        made.detach_storage_backend()


def shuffle(host: Any, seed: int) -> None:
    """Have the host pool hand out its pages in no order."""
    pages = host.alloc(host.available_size()).view(-1, PAGE)
    order = torch.randperm(len(pages), generator=torch.Generator().manual_seed(seed))
    for number in order.tolist():
        host.free(pages[number])


def are_scattered(indices: torch.Tensor) -> bool:
    """Say whether pages lie neither side by side nor in rising order."""
    steps = indices[PAGE::PAGE] - indices[:-PAGE:PAGE]
    return bool((steps < 0).any()) and int((steps == PAGE).sum()) * 2 < len(steps)


def find(made: Any, tokens: list[int], request: str) -> Any:
    """Have tokens looked up; return the operation, with its hit."""
    made.prefetch(request, tokens, None, [])
    return made.prefetch_hit_queue.get(timeout=WAIT_S)


def load(made: Any, operation: Any) -> int:
    """Have what was found loaded; return how many tokens were."""
    operation.host_indices = made.alloc_prefetch_host_buffers(
        operation, operation.storage_hit_count
    )
    made.prefetch_buffer.put(operation)
    done = 0
    while True:
        ack = made.ack_prefetch_queue.get(timeout=WAIT_S)
        if ack.completed_req:
            return done
        done = ack.completed_tokens


def through_controller(step: dict[str, Any]) -> dict[str, Any]:
    """Look pages up, store them, and load them at other indices of an emptied pool."""
    count = step.get("pages", 6)
    tokens = list(range(100, 100 + count * PAGE))
    with controller(step) as (made, host):
        before = find(made, tokens, "before").storage_hit_count
        shuffle(host, step.get("seed", 1))
        indices = host.alloc(len(tokens))
        random = torch.Generator().manual_seed(step.get("seed", 1))
        wanted = []
        for at in range(0, len(tokens), PAGE):
            page = host.get_dummy_flat_data_page()
            page.copy_(torch.randn(page.shape, generator=random))
            host.set_from_flat_data_page(int(indices[at]), page)
            wanted.append(host.get_data_page(int(indices[at])).clone())
        stored = 0
        if step.get("write", True):
            made.write_storage(
                indices, tokens, hash_value=get_storage_hash_str(tokens, None, page_size=PAGE)
            )
            stored = made.ack_backup_queue.get(timeout=WAIT_S).completed_tokens
        host.kv_buffer.zero_()
        host.free(indices)
        shuffle(host, step.get("seed", 1) + 1)
        operation = find(made, tokens + list(range(PAGE)), "after")
        loaded = load(made, operation) if operation.storage_hit_count else 0
        places = operation.host_indices
        found = [host.get_data_page(int(places[at])) for at in range(0, loaded, PAGE)]
        used = {int(index) // PAGE for index in places} if loaded else set()
        others = [page for page in range(host.page_num) if page not in used]
        counts = dict(made.storage_backend.counts.total)
        return {
            "before": before,
            "stored": stored,
            "hit": operation.storage_hit_count,
            "loaded": loaded,
            "equal": [torch.equal(one, other) for one, other in zip(wanted, found, strict=False)],
            "zeros": sum(not page.abs().sum() for page in wanted),
            "scattered": are_scattered(indices) and bool(loaded) and are_scattered(places),
            "moved": bool(loaded) and not torch.equal(indices, places),
            # Nothing else of the pool was touched.
            "others": sum(bool(host.get_data_page(page * PAGE).any()) for page in others),
            "counts": counts,
        }


def through_tree(step: dict[str, Any]) -> dict[str, Any]:
    """Insert a prompt into one tree, and have another one of the same kind restore it."""
    tokens = list(range(4 * PAGE))
    pool, allocator, tree = make_tree(step)
    slots = allocator.alloc(len(tokens))
    random = torch.Generator().manual_seed(3)
    for layer in range(LAYERS):
        for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer)):
            buffer[slots] = torch.randn(len(tokens), HEADS, DIM, generator=random)
    wanted = contents(pool, slots)
    tree.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots))
    stored = wait_for(tree, lambda: tree.cache_controller.storage_backend.counts.total, step)
    tree.detach_storage_backend()

    pool, allocator, tree = make_tree(step)
    longer = array("q", [*tokens, *range(7)])
    found = tree.match_prefix(MatchPrefixParams(key=RadixKey(longer)))
    assert not found.host_hit_length and not found.device_prefix_len
    request = CacheRequestHandle("r", 0)
    tree.prefetch_from_storage(request, found.last_host_node, longer)
    deadline = time.monotonic() + WAIT_S
    while not tree.check_prefetch_progress(request):
        tree.check_hicache_events()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    match = tree.match_prefix(MatchPrefixParams(key=RadixKey(longer)))
    places = restore(tree, match, found)
    result: dict[str, Any] = {"stored": stored, "host": match.host_hit_length}
    result["restored"] = len(places)
    result["equal"] = all(
        torch.equal(one, other) for one, other in zip(wanted, contents(pool, places), strict=True)
    )
    result["nonzero"] = all(bool(each.abs().sum()) for each in wanted)
    tree.detach_storage_backend()
    return result


def make_tree(step: dict[str, Any]) -> tuple[Any, Any, Any]:
    """Return a device pool, its allocator, and a tree with a host pool and kvd below them."""
    pool, allocator = device_pool(step)
    requests = ReqToTokenPool(size=8, max_context_len=512, device="cpu", enable_memory_saver=False)
    arguments = ServerArgs(
        model_path=GIVEN.get("model", "dummy"),
        device="cpu",
        page_size=PAGE,
        enable_hierarchical_cache=True,
        hicache_io_backend=IO[step["layout"]],
        hicache_mem_layout=step["layout"],
        hicache_write_policy="write_through",
        hicache_ratio=2.0,
        hicache_storage_backend="dynamic",
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_backend_extra_config=json.dumps(
            {**extra_of(step), "prefetch_threshold": PAGE}
        ),
    )
    set_global_server_args_for_scheduler(arguments)
    params = CacheInitParams(
        req_to_token_pool=requests,
        token_to_kv_pool_allocator=allocator,
        page_size=PAGE,
        disable=False,
        tree_components=(ComponentType.FULL,),
        tp_cache_group=torch.distributed.group.WORLD,
    )
    tree = UnifiedRadixCache(params=params)
    tree.init_hicache(arguments, params)
    tree.write_through_threshold = 1
    tree.load_back_threshold = 0
    assert tree.cache_controller.storage_host_pool.layout == step["layout"]
    return pool, allocator, tree


def contents(pool: Any, slots: torch.Tensor) -> list[torch.Tensor]:
    """Return keys and values of slots, layer by layer."""
    return [
        buffer[slots].clone()
        for layer in range(LAYERS)
        for buffer in (pool.get_key_buffer(layer), pool.get_value_buffer(layer))
    ]


def wait_for(tree: Any, counts: Any, step: dict[str, Any]) -> int:
    """Have the tree go on until its pages are stored; return how many."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        tree.check_hicache_events()
        if counts()["pages_saved"] >= 4:
            break
        time.sleep(0.01)
    return int(counts()["pages_saved"])


def restore(tree: Any, match: Any, empty: Any) -> torch.Tensor:
    """Have what lies in the host pool loaded back; return its slots of the device pool."""
    request = SimpleNamespace(
        rid="r",
        last_node=match.last_device_node,
        swa_host_hit_length=0,
        mamba_host_hit_length=0,
        kv=SimpleNamespace(mamba_pool_idx=None),
    )
    tree.init_load_back(
        InitLoadBackParams(
            best_match_node=match.best_match_node,
            host_hit_length=match.host_hit_length,
            req=request,
        )
    )
    counter = tree.cache_controller.layer_done_counter
    counter.set_consumer(tree.ready_to_load_host_cache())
    for layer in range(LAYERS):
        counter.wait_until(layer)
    core = tree.tree_core
    return core.collect_full_device_indices(match.best_match_node, empty.last_device_node)


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


def mha_pool(layout: str, heads: int = HEADS) -> Any:
    """Return a host pool."""
    device = MHATokenToKVPool(
        size=TOKENS,
        page_size=PAGE,
        dtype=torch.float32,
        head_num=heads,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    about = device._mha_buffer_info()
    return get_mha_host_pool_cls(about)(
        about,
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
    )


def mla_pool(layout: str) -> Any:
    """Return a host pool of latent attention."""
    device = MLATokenToKVPool(
        size=TOKENS,
        page_size=PAGE,
        dtype=torch.float32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    return MLATokenToKVPoolHost(
        device._mla_buffer_info(),
        host_to_device_ratio=2.0,
        host_size=0,
        page_size=PAGE,
        layout=layout,
        pin_memory=False,
        device="cpu",
        device_capacity_tokens=TOKENS,
        start_layer=0,
        end_layer=LAYERS,
        target_layer_num=LAYERS,
    )


def fill(pool: Any, count: int, seed: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Fill pages in no order; return their indices, and what they hold."""
    shuffle(pool, seed)
    indices = pool.alloc(count * PAGE)
    random = torch.Generator().manual_seed(seed)
    for at in range(0, count * PAGE, PAGE):
        page = pool.get_dummy_flat_data_page()
        page.copy_(torch.randn(page.shape, generator=random))
        pool.set_from_flat_data_page(int(indices[at]), page)
    return indices, read(pool, indices)


def read(pool: Any, indices: torch.Tensor) -> list[torch.Tensor]:
    """Return what pages hold."""
    return [pool.get_data_page(int(index)).clone() for index in indices[::PAGE]]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Say whether pages are equal."""
    return all(torch.equal(mine, yours) for mine, yours in zip(one, other, strict=True))


def hashes(count: int, **namespace: str) -> list[str]:
    """Return SGLang's hashes of a prompt's pages."""
    key = RadixKey(array("q", range(7, 7 + count * PAGE)), **namespace)
    return list(get_storage_hash_str(key, None, page_size=PAGE))


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


STEPS = {
    "controller": through_controller,
    "tree": through_tree,
    "latent": as_ranks_of_latent_attention,
    "shards": as_shards,
    "pools": with_other_pools,
}


def main() -> None:
    """Go through the steps."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1
    )
    for step in GIVEN["steps"]:
        with get_parallel().override(**RANKS), host_memory_budget_scope(1 << 30):
            found = STEPS[step["do"]](step)
        sys.stdout.write("RESULT " + json.dumps({**step, **found}) + "\n")
        sys.stdout.flush()
    # Threads of the engine's that nobody ends.
    os._exit(0)


if __name__ == "__main__":
    main()
