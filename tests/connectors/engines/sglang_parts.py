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
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    InitLoadBackParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components.base import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.mem_cache.utils import get_storage_hash_str
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang_backends import (
    as_ranks_of_latent_attention,
    as_shards,
    cleared_in_vain,
    with_other_pools,
)
from sglang_pools import (
    DIM,
    HEADS,
    LAYERS,
    PAGE,
    are_scattered,
    device_pool,
    extra_of,
    fill,
    mha_pool,
    read,
    shuffle,
)

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


@contextmanager
def controller(step: dict[str, Any]) -> Any:
    """Give a controller with its host pool."""
    pool, allocator = device_pool(step.get("dtype", "float32"))
    host = mha_pool(step["layout"], device=pool)
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
        indices, wanted = fill(host, count, 1)
        stored = 0
        if step.get("write", True):
            made.write_storage(
                indices, tokens, hash_value=get_storage_hash_str(tokens, None, page_size=PAGE)
            )
            stored = made.ack_backup_queue.get(timeout=WAIT_S).completed_tokens
        host.kv_buffer.zero_()
        host.free(indices)
        shuffle(host, 2)
        operation = find(made, tokens + list(range(PAGE)), "after")
        loaded = load(made, operation) if operation.storage_hit_count else 0
        places = operation.host_indices
        found = read(host, places[:loaded]) if loaded else []
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
    pool, allocator = device_pool(step.get("dtype", "float32"))
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


STEPS = {
    "controller": through_controller,
    "tree": through_tree,
    "latent": as_ranks_of_latent_attention,
    "shards": as_shards,
    "pools": with_other_pools,
    "clear": cleared_in_vain,
}


def main() -> None:
    """Go through the steps."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tempfile.mktemp()}", rank=0, world_size=1
    )
    for step in GIVEN["steps"]:
        with get_parallel().override(**RANKS), host_memory_budget_scope(1 << 30):
            found = STEPS[step["do"]]({**step, "socket": GIVEN["socket"]})
        sys.stdout.write("RESULT " + json.dumps({**step, **found}) + "\n")
        sys.stdout.flush()
    # Threads of the engine's that nobody ends.
    os._exit(0)


if __name__ == "__main__":
    main()
