"""Which of an engine's KV-cache groups are kept, under which namespaces and keys."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import msgspec

from kvd_connectors.identity import fingerprint, namespace_of
from kvd_connectors.vllm.options import Options

logger = logging.getLogger(__name__)

# The kinds of state that a prefix's block hash determines, token by token.
ATTENTION = (
    "full_attention",
    "mla_attention",
    "sliding_window",
    "sliding_window_mla",
    "chunked_local_attention",
    "sink_full_attention",
)
# Of these kinds only the blocks that the next token attends to have to be there.
WINDOWED = ("sliding_window", "sliding_window_mla")
CHUNKED = ("chunked_local_attention",)
# Requests keep every block of these to their end.
KEPT = ("FullAttentionSpec", "MLAAttentionSpec", "SinkFullAttentionSpec")
# Without a given seed these start from a random one.
SEEDED_HASHES = ("xxhash", "xxhash_cbor")


class Group(msgspec.Struct, frozen=True):
    """One KV-cache group that is kept.

    Attributes
    ----------
    number : int
        Its place among the engine's groups.
    layers : tuple of str
        In the order in which a block's bytes hold them.
    block_tokens : int
    hashes : int
        Block hashes that make up one block; the last of them is its key.
    window_tokens, chunk_tokens : int
        How far the next token looks back: over a window, or to the start of a chunk. 0: over
        everything.
    releases : bool
        Whether the engine takes blocks from a request while it runs.
    """

    number: int
    layers: tuple[str, ...]
    block_tokens: int
    hashes: int
    window_tokens: int = 0
    chunk_tokens: int = 0
    releases: bool = False

    @property
    def is_partial(self) -> bool:
        """Whether a hit needs only some of the blocks before its end."""
        return bool(self.window_tokens or self.chunk_tokens)

    def first_needed(self, tokens: int) -> int:
        """Return the first block that is needed to go on after so many tokens."""
        skipped = 0
        if self.window_tokens:
            skipped = max(0, tokens - self.window_tokens + 1)
        elif self.chunk_tokens:
            skipped = tokens // self.chunk_tokens * self.chunk_tokens
        return skipped // self.block_tokens

    def keys(self, block_hashes: Sequence[bytes], first: int, last: int) -> Sequence[bytes]:
        """Return the keys of a request's blocks of this group, from one to before another."""
        return block_hashes[(first + 1) * self.hashes - 1 : last * self.hashes : self.hashes]


class Plan(msgspec.Struct, frozen=True):
    """What is kept of an engine's cache.

    Attributes
    ----------
    groups : tuple of Group
        Empty where nothing can be: `reason` says why.
    unit_tokens : int
        A hit is a multiple of so many tokens.
    block_count : int
        Blocks of the engine's cache.
    names : tuple of tuple of str
        Namespace of each rank and group.
    single : bool
        Whether the engine has one group, so that its blocks' numbers are unique.
    reason : str
    """

    groups: tuple[Group, ...]
    unit_tokens: int
    block_count: int
    names: tuple[tuple[str, ...], ...]
    single: bool
    reason: str = ""


def make_plan(vllm_config: Any, kv_cache_config: Any, options: Options) -> Plan:
    """Return what can be kept of the cache that an engine describes."""
    groups: list[Group] = []
    hash_tokens = kv_cache_config.hash_block_size
    reason = "" if hash_tokens else "the engine hashes no blocks"
    parallel = vllm_config.parallel_config
    if _context_ranks(parallel) > 1:
        # Ranks hold different tokens of one block.
        reason, hash_tokens = "context parallelism is not supported", None
    # Not those that the engine's own prefix cache leaves out: scratch memory of a request.
    for number in kv_cache_config.prefix_cacheable_group_ids if hash_tokens else ():
        spec = kv_cache_config.kv_cache_groups[number].kv_cache_spec
        kind = _kind(spec)
        if kind not in ATTENTION or spec.block_size % hash_tokens:
            reason = (
                f"group {number} is {kind} in blocks of {spec.block_size} tokens, hashed by "
                f"{hash_tokens}: its state does not follow from a block's hash"
            )
            break
        groups.append(
            Group(
                number,
                tuple(kv_cache_config.kv_cache_groups[number].layer_names),
                spec.block_size,
                spec.block_size // hash_tokens,
                *_lookback(spec, kind),
            )
        )
    if reason:
        groups = []
        logger.warning("KvdConnector keeps nothing of this model: %s", reason)
    _warn_of_seeds(vllm_config)
    facts = _facts(vllm_config, kv_cache_config, options)
    # Which layers lie where is known to the workers alone; it follows from the other facts.
    is_whole = parallel.pipeline_parallel_size == 1
    abouts = [_about(kv_cache_config, each, is_whole) for each in groups]
    ranks = _ranks(vllm_config, kv_cache_config)
    model = str(vllm_config.model_config.model)
    names = tuple(
        tuple(
            namespace_of("vllm", model, {**facts, "rank": rank, "group": each}) for each in abouts
        )
        for rank in ranks
    )
    unit = math.lcm(
        *(each.block_tokens for each in groups),
        kv_cache_config.cache_hit_alignment_tokens or 1,
    )
    return Plan(
        tuple(groups),
        unit,
        kv_cache_config.num_blocks,
        names,
        len(kv_cache_config.kv_cache_groups) == 1,
        reason,
    )


def _kind(spec: Any) -> str:
    from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind

    kind = get_kv_cache_spec_kind(spec)
    return str(getattr(kind, "value", kind))


def _lookback(spec: Any, kind: str) -> tuple[int, int, bool]:
    """Return a group's window, its chunk and whether its blocks are released early."""
    each = _first(spec)
    if kind in WINDOWED:
        return each.sliding_window + getattr(each, "extra_retained_tokens", 0), 0, True
    if kind in CHUNKED:
        return 0, each.attention_chunk_size, True
    return 0, 0, type(each).__name__ not in KEPT


def _context_ranks(parallel: Any) -> int:
    names = ("decode_context_parallel_size", "prefill_context_parallel_size")
    return math.prod(getattr(parallel, name, 1) or 1 for name in names)


def _ranks(vllm_config: Any, kv_cache_config: Any) -> list[str]:
    """Return what tells the ranks' bytes apart, in the order of the engine's ranks."""
    parallel = vllm_config.parallel_config
    size, stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    replicas = max(1, getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)
    return [
        f"{rank // replicas}/{max(1, size // replicas)}"
        + (f" stage {stage}/{stages}" if stages > 1 else "")
        for stage in range(stages)
        for rank in range(size)
    ]


def _about(kv_cache_config: Any, group: Group, with_layers: bool) -> dict[str, Any]:
    """Return the facts of one group."""
    # Of layers that differ in size the scheduler is told the first one's alone.
    spec = _first(kv_cache_config.kv_cache_groups[group.number].kv_cache_spec)
    return {
        "number": group.number,
        "spec": repr(spec),
        "layers": list(group.layers) if with_layers else None,
        "page_bytes": spec.page_size_bytes,
    }


def _first(spec: Any) -> Any:
    """Return the spec of a group's first layer."""
    return next(iter(getattr(spec, "kv_cache_specs", {}).values()), spec)


def _facts(vllm_config: Any, kv_cache_config: Any, options: Options) -> dict[str, Any]:
    model = vllm_config.model_config
    cache = vllm_config.cache_config
    parallel = vllm_config.parallel_config
    commit = getattr(model.hf_config, "_commit_hash", None)
    return {
        "model": fingerprint(str(model.model), model.revision, commit),
        "dtype": str(model.dtype),
        "cache_dtype": str(cache.cache_dtype),
        "quantization": str(model.quantization),
        "layout": str(kv_cache_config.kv_cache_layout),
        "platform": _platform(),
        "hash": [
            str(cache.prefix_caching_hash_algo),
            _hash_seed(),
            kv_cache_config.hash_block_size,
        ],
        "pp": [parallel.pipeline_parallel_size, os.environ.get("VLLM_PP_LAYER_PARTITION", "")],
        "salt": options.salt,
    }


def _platform() -> str:
    """Return what a block's interior depends on besides its layout: kernels pack it their way."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.device_type == "cpu":
        return f"cpu/{torch.backends.cpu.get_cpu_capability()}"
    return f"{current_platform.device_type}/{os.environ.get('VLLM_ATTENTION_BACKEND', '')}"


def _hash_seed() -> str:
    """Return the seed of the engine's block hashes, as far as it is said."""
    return os.environ.get("PYTHONHASHSEED", "")


def _warn_of_seeds(vllm_config: Any) -> None:
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    seed = _hash_seed()
    if algorithm in SEEDED_HASHES and not seed:
        logger.warning(
            "prefix_caching_hash_algo=%s without PYTHONHASHSEED seeds block hashes at random: no "
            "other process finds these blocks. Remedy: set PYTHONHASHSEED to one value in every "
            "engine, or use sha256_cbor",
            algorithm,
        )
    elif seed:
        logger.warning(
            "PYTHONHASHSEED=%s is part of every block hash: only engines with the same value "
            "find these blocks",
            seed,
        )
