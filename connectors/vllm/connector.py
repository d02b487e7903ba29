"""`KvdConnector`: vLLM's hooks, each handed to the scheduler's or the workers' side."""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

import kvd
from kvd_connectors.vllm.metadata import StepMetadata, WorkerNews
from kvd_connectors.vllm.options import read_options
from kvd_connectors.vllm.plan import Plan, make_plan
from kvd_connectors.vllm.scheduler import SchedulerSide
from kvd_connectors.vllm.stats import KvdPromMetrics, KvdStats
from kvd_connectors.vllm.worker import WorkerSide

logger = logging.getLogger(__name__)
CHUNK_FILE_VARIABLES = ("KVD_HIPFILE_ROOTS", "INFERA_KVD_HIPFILE_ROOTS", "KVD_AIS")
Hook = TypeVar("Hook", bound=Callable[..., Any])


def timed(hook: Hook) -> Hook:
    """Count the time that the engine spends in a hook."""

    @functools.wraps(hook)
    def call(self: Any, *arguments: Any, **options: Any) -> Any:
        started = time.perf_counter_ns()
        try:
            return hook(self, *arguments, **options)
        finally:
            self.counts.add("hook_us", (time.perf_counter_ns() - started) // 1000)

    return call  # type: ignore[return-value]


def _chunk_files(plan: Plan, vllm_config: Any, kv_cache_config: Any) -> Any:
    """Return what the environment asks for of chunk files; without it they are not imported."""
    if not any(os.environ.get(name) for name in CHUNK_FILE_VARIABLES):
        return None
    from kvd_connectors.gpu_direct.vllm_files import chunk_files

    stages = vllm_config.parallel_config.pipeline_parallel_size
    return chunk_files(plan, kv_cache_config, stages=stages)


class KvdConnector(KVConnectorBase_V1, SupportsHMA):
    """Keeps an engine's blocks in kvd, by the engine's own block hashes.

    A cache and nothing else: without a daemon every look-up misses, and nothing it does fails
    a request. Settings: `kvd_connectors.vllm.options.Options`.
    """

    _cache_hit_source = CacheHitSource.HOST

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = read_options(vllm_config.kv_transfer_config.kv_connector_extra_config)
        plan = make_plan(vllm_config, kv_cache_config, options)
        files = _chunk_files(plan, vllm_config, kv_cache_config)
        plan = plan if files is None else files.plan
        self._options = options
        self._plan = plan
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role is KVConnectorRole.SCHEDULER:
            if files is not None:
                client = files.presence()
            else:
                client = kvd.Client(
                    options.socket, timeout_s=options.lookup_timeout_s, engine="vllm"
                )
            self._scheduler = SchedulerSide(options, plan, client)
            self.counts = self._scheduler.counts
        else:
            parallel = vllm_config.parallel_config
            stages = parallel.pipeline_parallel_size
            rank = parallel.rank % (parallel.tensor_parallel_size * stages)
            self._worker = WorkerSide(options, plan, rank, self._connect, files)
            self.counts = self._worker.counts

    def _connect(self, timeout_s: float, block_bytes: int) -> kvd.Client:
        return kvd.Client(
            self._options.socket,
            timeout_s=timeout_s,
            block_bytes=block_bytes,
            l1_bytes=block_bytes * self._plan.block_count,
            engine="vllm",
        )

    @property
    def requires_kv_delivery(self) -> bool:
        """Nobody depends on a save."""
        return False

    # -- the scheduler's side ------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Take note of the engine's blocks."""
        self._scheduling().holds.pool = gpu_block_pool

    def on_new_request(self, request: Any) -> None:
        """Read the request's own retention."""
        self._scheduling().add(request)

    @timed
    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Return how many tokens kvd has beyond those computed."""
        return self._scheduling().matched(request, num_computed_tokens)

    @timed
    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Decide on a load."""
        self._scheduling().allocated(request, blocks, num_external_tokens)

    @timed
    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return the step's loads and saves."""
        return self._scheduling().step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Take in what the workers finished."""
        self._scheduling().hear(connector_output)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks while they are being saved."""
        return self._scheduling().finished(request), None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep the blocks of all groups while they are being saved."""
        return self._scheduling().finished(request), None

    def has_pending_push_work(self) -> bool:
        """Have the engine go on stepping until saved blocks are free."""
        return self._scheduler is not None and self._scheduler.is_waiting()

    def has_pending_block_frees(self) -> bool:
        """Say whether blocks become free without a preemption."""
        return self._scheduler is not None and self._scheduler.holds_blocks()

    def reset_cache(self) -> bool | None:
        """Remove what is stored: the weights changed."""
        return self._scheduling().clear()

    def _scheduling(self) -> SchedulerSide:
        assert self._scheduler is not None, "a hook of the scheduler's side"
        return self._scheduler

    # -- the workers' side ---------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the engine's cache into use."""
        self._working().register(kv_caches)

    def unregister_kv_caches(self) -> None:
        """Let go of a cache that is about to be unmapped."""
        self._working().unregister()

    def restore_kv_caches(self, kv_caches: dict[str, torch.Tensor] | None = None) -> None:
        """Take a cache that was mapped again into use."""
        if kv_caches is not None:
            self._working().register(kv_caches)

    @timed
    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        """Stop reading blocks that are about to be written over."""
        if isinstance(kv_connector_metadata, StepMetadata):
            self._working().preempted(kv_connector_metadata)

    @timed
    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin the step's loads."""
        self._working().load(self._metadata())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are over before the step, or belong to a later one."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing: blocks are saved whole, after the step."""

    @timed
    def wait_for_save(self) -> None:
        """Queue the step's saves."""
        self._working().save(self._metadata())

    @timed
    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Return requests whose saves or loads are over."""
        worker = self._working()
        sent, received = worker.finished(finished_req_ids)
        results = KVConnectorTransferResults(finished_sending=sent, finished_recving=received)
        if not self._plan.single:
            # Blocks of several groups share numbers: the engine is told whole requests.
            results.failed_recving = worker.failed()[1]
        return results

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """As `get_transfer_results`, for engines that ask so."""
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending or None, results.finished_recving or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Return exactly the blocks that were not loaded."""
        return self._working().failed()[0] if self._plan.single else set()

    def build_connector_worker_meta(self) -> WorkerNews | None:
        """Tell the scheduler's side how far the saves are and whose loads failed."""
        return self._working().news()

    def _metadata(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    def _working(self) -> WorkerSide:
        assert self._worker is not None, "a hook of the workers' side"
        return self._worker

    # -- both ----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KvdStats | None:
        """Return what was counted since the last time."""
        new = self.counts.take()
        return KvdStats(data=dict(new)) if new else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KvdStats:
        """Return counts as the engine's log wants them."""
        return KvdStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KvdPromMetrics:
        """Return the counters as Prometheus metrics."""
        return KvdPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Finish what is being saved, for a while, and leave."""
        if self._worker is not None:
            self._worker.unregister()
        if self._scheduler is not None:
            self._scheduler.lookups.close()
            self._scheduler.client.close()
