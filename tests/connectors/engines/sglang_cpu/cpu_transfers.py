"""SGLang's copies between device and host pools, which are kernels of GPUs, for the processor."""

import ctypes

import torch


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices.cpu()] = source[src_indices.cpu()]


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    layers = len(src_ptrs) // len(dst_ptrs)
    page, at = dst_indices // page_size, dst_indices % page_size
    for number, target in enumerate(dst_ptrs):
        for layer in range(layers):
            target[page, layer, at] = src_ptrs[number * layers + layer][src_indices]


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size
):
    page, at = src_indices // page_size, src_indices % page_size
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[page, layer_id, at]


def _rows(address, indices, like, shape):
    """Return rows of memory that only its address is known of."""
    count = int(indices.max()) + 1
    size = torch.Size(shape).numel()
    memory = (ctypes.c_uint8 * (count * size * like.element_size())).from_address(int(address))
    return torch.frombuffer(memory, dtype=like.dtype).view(count, *shape)[indices]


def transfer_kv_all_layer_lf_pf(
    src_k_layers,
    dst_k,
    src_v_layers,
    dst_v,
    src_indices,
    dst_indices,
    item_size,
    dst_layout_dim,
    num_layers,
):
    # dst: [tokens, layers, heads, dim]
    for tables, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        for layer in range(num_layers):
            target[dst_indices, layer] = _rows(
                tables[layer], src_indices, target, target.shape[2:]
            )


def transfer_kv_per_layer_pf_lf(
    src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim
):
    dst_k[dst_indices] = src_k[src_indices, layer_id]
    dst_v[dst_indices] = src_v[src_indices, layer_id]


def transfer_kv_all_layer_lf_ph(
    src_k_layers,
    dst_k,
    src_v_layers,
    dst_v,
    src_indices,
    dst_indices,
    item_size,
    dst_layout_dim,
    num_layers,
    page_size,
    head_num,
):
    # dst: [pages, heads, page, layers, dim]
    page, at = dst_indices // page_size, dst_indices % page_size
    for tables, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        shape = (head_num, target.shape[-1])
        for layer in range(num_layers):
            target[page, :, at, layer] = _rows(tables[layer], src_indices, target, shape)


def transfer_kv_per_layer_ph_lf(
    src_k,
    dst_k,
    src_v,
    dst_v,
    src_indices,
    dst_indices,
    layer_id,
    item_size,
    src_layout_dim,
    page_size,
    head_num,
):
    page, at = src_indices // page_size, src_indices % page_size
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        target[dst_indices] = source[page, :, at, layer_id]


TRANSFERS = (
    transfer_kv_direct,
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_per_layer_pf_lf,
    transfer_kv_all_layer_lf_ph,
    transfer_kv_per_layer_ph_lf,
)


def patch(module):
    """Put the copies where the host pools look for them."""
    import sglang.srt.mem_cache.pool_host.base as base
    import sglang.srt.mem_cache.pool_host.common as common

    for each in TRANSFERS:
        setattr(module, each.__name__, each)
    # 10 GiB have to be free beside the pool, if not for this.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    # Nor is there memory that is pinned for a GPU.
    make = base.HostKVCache.__init__

    def make_unpinned(self, **options):
        make(self, **{**options, "pin_memory": False})

    base.HostKVCache.__init__ = make_unpinned
    common._cuda_host_register = lambda *_, **__: None
