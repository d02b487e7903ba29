"""What the vLLM connector keeps of caches that no small model here has.

Run in the engine's environment by `test_vllm_scheduler.py`. The caches' descriptions are vLLM's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.core.kv_cache_utils import generate_scheduler_kv_cache_config
from vllm.v1.core.single_type_kv_cache_manager import (
    ChunkedLocalAttentionManager,
    SlidingWindowManager,
)
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    HiSparseHotSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from kvd_connectors.vllm.options import Options
from kvd_connectors.vllm.plan import Plan, make_plan

SHAPE: dict[str, Any] = {
    "block_size": 16,
    "num_kv_heads": 2,
    "head_size": 32,
    "dtype": torch.float32,
}
FULL = FullAttentionSpec(**SHAPE)
WIDER = FullAttentionSpec(**{**SHAPE, "head_size": 64})


def cache(*groups: tuple[list[str], Any]) -> KVCacheConfig:
    return KVCacheConfig(
        num_blocks=10,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(*group) for group in groups],
        kv_cache_layout="LBHNC",
        hash_block_size=16,
        cache_hit_alignment_tokens=16,
    )


def plan(config: KVCacheConfig, **parallel: int) -> Plan:
    sizes = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **parallel}
    model = SimpleNamespace(
        model="somebody/model",
        revision=None,
        dtype="float32",
        quantization=None,
        hf_config=SimpleNamespace(),
    )
    engine = SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes),
        model_config=model,
        cache_config=SimpleNamespace(
            prefix_caching_hash_algo="sha256", cache_dtype="auto", block_size=16
        ),
    )
    return make_plan(engine, config, Options())


def test_layers_of_several_sizes_have_one_name_on_both_sides() -> None:
    """The scheduler is told less of such a group than the workers are."""
    several = UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={"narrow": FULL, "wide": WIDER}
    )
    worker = cache((["narrow", "wide"], several))
    scheduler = generate_scheduler_kv_cache_config([worker])
    assert type(scheduler.kv_cache_groups[0].kv_cache_spec) is FullAttentionSpec
    assert plan(worker).names == plan(scheduler).names
    assert plan(worker).names != plan(cache((["narrow", "wide"], WIDER))).names


def test_stages_of_a_pipeline_have_one_name_each_on_both_sides() -> None:
    stages = [cache((["layer 0", "layer 1"], FULL)), cache((["layer 2"], FULL))]
    told = plan(
        generate_scheduler_kv_cache_config(stages),
        pipeline_parallel_size=2,
        tensor_parallel_size=2,
    ).names
    assert len(set(told)) == 4
    for stage in stages:
        assert plan(stage, pipeline_parallel_size=2, tensor_parallel_size=2).names == told
    assert not set(told) & set(plan(stages[0], tensor_parallel_size=2).names)


def test_beside_a_recurrent_state_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    state = MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))
    found = plan(cache((["attention"], FULL), (["mamba"], state)))
    assert found.groups == () and "mamba" in found.reason
    assert caplog.text.count("keeps nothing of this model") == 1


def test_ranks_that_share_a_block_s_tokens_keep_nothing() -> None:
    found = plan(cache((["layer"], FULL)), decode_context_parallel_size=2)
    assert found.groups == () and "context" in found.reason


def test_scratch_memory_of_a_request_is_left_out() -> None:
    scratch = HiSparseHotSpec(block_size=16, page_size=4096, blocks_per_request=1)
    found = plan(cache((["attention"], FULL), (["scratch"], scratch)))
    assert [group.layers for group in found.groups] == [("attention",)]
    assert not found.single


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 40, 64])
def test_a_window_looks_back_as_far_as_the_engine_says(window: int) -> None:
    spec = SlidingWindowSpec(**SHAPE, sliding_window=window, extra_retained_tokens=2)
    (group,) = plan(cache((["layer"], spec))).groups
    played = SimpleNamespace(sliding_window=window, extra_retained_tokens=2)
    assert group.releases and group.is_partial
    for tokens in range(200):
        skipped = SlidingWindowManager.get_num_skipped_tokens(played, tokens)
        assert group.first_needed(tokens) == skipped // 16


def test_a_chunk_looks_back_to_its_start() -> None:
    spec = ChunkedLocalAttentionSpec(**SHAPE, attention_chunk_size=64)
    (group,) = plan(cache((["layer"], spec))).groups
    played = SimpleNamespace(attention_chunk_size=64)
    assert group.releases and group.is_partial
    for tokens in range(200):
        skipped = ChunkedLocalAttentionManager.get_num_skipped_tokens(played, tokens)
        assert group.first_needed(tokens) == skipped // 16


def test_full_attention_looks_back_over_everything() -> None:
    (group,) = plan(cache((["layer"], FULL))).groups
    assert not group.releases and not group.is_partial and group.first_needed(1000) == 0
