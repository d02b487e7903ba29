"""Pools of the real SGLang, filled and read without kvd's help."""

from __future__ import annotations

from array import array
from typing import Any

import torch
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import get_mha_host_pool_cls
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.utils import get_storage_hash_str

PAGE, LAYERS, HEADS, DIM = 16, 3, 2, 32
TOKENS = 1024
# Of every host pool.
SIZES: dict[str, Any] = {
    "host_to_device_ratio": 2.0,
    "host_size": 0,
    "page_size": PAGE,
    "pin_memory": False,
    "device": "cpu",
    "device_capacity_tokens": TOKENS,
    "start_layer": 0,
    "end_layer": LAYERS,
}


def extra_of(step: dict[str, Any]) -> dict[str, Any]:
    """Return SGLang's extra configuration for a step."""
    extra: dict[str, Any] = {
        "backend_name": "kvd",
        "module_path": "kvd_connectors.sglang",
        "class_name": "KvdHiCacheStorage",
        "kvd": {"socket": step["socket"], "digests": True, **step.get("kvd", {})},
    }
    if step["v1"]:
        extra["interface_v1"] = 1
    return extra


def device_pool(dtype: str = "float32", heads: int = HEADS) -> tuple[Any, Any]:
    """Return a device pool and its allocator."""
    kind = getattr(torch, dtype)
    pool = MHATokenToKVPool(
        size=TOKENS,
        page_size=PAGE,
        dtype=kind,
        head_num=heads,
        head_dim=DIM,
        layer_num=LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    allocator = PagedTokenToKVPoolAllocator(
        TOKENS, page_size=PAGE, dtype=kind, device="cpu", kvcache=pool, need_sort=False
    )
    return pool, allocator


def mha_pool(layout: str, heads: int = HEADS, device: Any = None) -> Any:
    """Return a host pool."""
    if device is None:
        device, _ = device_pool(heads=heads)
    about = device._mha_buffer_info()
    return get_mha_host_pool_cls(about)(about, layout=layout, **SIZES)


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
        device._mla_buffer_info(), layout=layout, target_layer_num=LAYERS, **SIZES
    )


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
