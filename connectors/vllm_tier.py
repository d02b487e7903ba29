"""`KvdSecondaryTier`: kvd below vLLM's native offloading.

In ``kv_connector_extra_config`` of vLLM's OffloadingConnector::

    "secondary_tiers": [{"type": "KvdSecondaryTier", "module_path": "kvd_connectors.vllm_tier"}]

with ``socket``, ``salt``, ``retention`` and ``timeout_s`` beside them where the defaults fail.
All methods run in the engine's scheduler: they queue, and a thread for each direction copies.
"""

from __future__ import annotations

import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from vllm.v1.kv_offload.base import (
    LookupResult,
    Medium,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

import kvd
from kvd_connectors.identity import fingerprint, namespace_of
from kvd_connectors.vllm.options import Keep, read_keep
from kvd_connectors.vllm.transfer import Pair, batches

logger = logging.getLogger(__name__)

JOIN_S = 10.0


class _Lookups(AsyncLookupManager):
    """Asks kvd in a thread of its own, a step's keys at a time."""

    def __init__(self, tier: KvdSecondaryTier) -> None:
        self._tier = tier
        super().__init__(tier_type=tier.tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        if self._tier.keep_of(req_context).retention == "none":
            return [False] * len(keys)
        return self._tier.blocks.exists([bytes(key) for key in keys])


class _Jobs:
    """Runs jobs of one direction in order, in a thread."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], JobResult] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[JobResult] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._open = 0
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def add(self, job: Callable[[], JobResult]) -> None:
        with self._idle:
            self._open += 1
        self._queue.put(job)

    def finished(self) -> list[JobResult]:
        found = []
        while True:
            try:
                found.append(self._done.get_nowait())
            except queue.Empty:
                return found

    def drain(self) -> None:
        with self._idle:
            while self._open:
                self._idle.wait()

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join(JOIN_S)

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            self._done.put(job())
            with self._idle:
                self._open -= 1
                self._idle.notify_all()


class KvdSecondaryTier(SecondaryTierManager):
    """Keeps chunks of vLLM's offloading in kvd.

    Parameters
    ----------
    offloading_spec, primary_kv_view, tier_type, backpressure_detector
        As vLLM gives them.
    socket : str, optional
        kvd's socket; default $KVD_SOCKET, then kvd's own.
    salt : str
        Engines with another one share nothing.
    retention : str
        Of requests that do not say (``kv_transfer_params``: kvd_retention, kvd_ttl_seconds).
    timeout_s : float
        Bound of every call to kvd.
    """

    medium = Medium.STORAGE

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str,
        socket: str | None = None,
        salt: str = "",
        retention: str = "long",
        timeout_s: float = 5.0,
        backpressure_detector: Any = None,
    ) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        # Views of two dimensions cannot be cut in Python.
        self._chunks = np.asarray(primary_kv_view).view(np.uint8)
        self._retention = retention
        name = namespace_of("vllm-tier", *_identity(offloading_spec, self._block_size_bytes, salt))
        self._client = kvd.Client(
            socket, timeout_s=timeout_s, block_bytes=self._block_size_bytes, engine="vllm-tier"
        )
        self.blocks = self._client.namespace(name)
        self._stores = _Jobs("kvd-tier-store")
        self._loads = _Jobs("kvd-tier-load")
        self._missed: queue.SimpleQueue[list[OffloadKey]] = queue.SimpleQueue()
        self._lookups = _Lookups(self)
        logger.info("kvd tier: chunks of %d bytes in %s", self._block_size_bytes, name)

    def keep_of(self, context: ReqContext) -> Keep:
        """Return what a request asks for."""
        found = context.get_state(Keep)
        if found is None:
            found = read_keep(context.kv_transfer_params, self._retention)
            context.set_state(found)
        return found

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        """Read the request's own retention."""
        self.keep_of(req_context)
        return RequestOffloadingContext()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        """Say whether kvd has a chunk, or that it was not asked yet."""
        there = self._lookups.lookup(key, req_context)
        if there is None:
            return LookupResult.RETRY
        return LookupResult.HIT if there else LookupResult.MISS

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        """Ask for what this step looked up."""
        self._lookups.flush()

    def on_request_finished(self, req_context: ReqContext) -> None:
        """Forget a request's look-ups."""
        self._lookups.cleanup(req_context.req_id)

    def submit_store(self, job_metadata: TransferJob) -> None:
        """Queue chunks to be stored."""
        self._stores.add(lambda: self._store(job_metadata))

    def submit_load(self, job_metadata: TransferJob) -> None:
        """Queue chunks to be loaded."""
        self._loads.add(lambda: self._load(job_metadata))

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Nothing: a load counts as a use, and one in the primary tier is vLLM's to know."""

    def get_finished_jobs(self) -> list[JobResult]:
        """Return what was stored and loaded since the last call."""
        found = self._stores.finished() + self._loads.finished()
        while not self._missed.empty():
            self._lookups.mark_miss(self._missed.get())
        return found

    def drain_jobs(self) -> None:
        """Wait until nothing touches the primary tier."""
        self._stores.drain()
        self._loads.drain()

    def shutdown(self) -> None:
        """Finish what is queued, for a while, and leave."""
        self._lookups.shutdown()
        self._stores.close()
        self._loads.close()
        self._client.close()

    # -- in the threads ------------------------------------------------------------------------

    def _pairs(self, job: TransferJob) -> list[Pair]:
        return [
            (int(chunk), bytes(key)) for key, chunk in zip(job.keys, job.chunk_ids, strict=True)
        ]

    def _store(self, job: TransferJob) -> JobResult:
        started = time.monotonic()
        keep = self.keep_of(job.req_context)
        wanted = self._pairs(job) if keep.retention != "none" else []
        stored = 0
        try:
            for part in batches(wanted, self._block_size_bytes):
                items = [(key, self._chunks[chunk].data) for chunk, key in part]
                stored += sum(
                    self.blocks.put_many(items, retention=keep.retention, ttl_s=keep.ttl_s)
                )
        except Exception:
            logger.exception("storing chunks failed")
        # A cache: what was refused is a later miss and no failure of the request.
        return JobResult(
            job.job_id,
            True,
            transfer_time=time.monotonic() - started,
            transfer_bytes=stored * self._block_size_bytes,
        )

    def _load(self, job: TransferJob) -> JobResult:
        started = time.monotonic()
        loaded: list[OffloadKey] = []
        pairs = self._pairs(job)
        try:
            for part in batches(pairs, self._block_size_bytes):
                buffers = [self._chunks[chunk].data for chunk, _ in part]
                lengths = self.blocks.get_many_into([key for _, key in part], buffers)
                loaded += [
                    OffloadKey(key)
                    for (_, key), length in zip(part, lengths, strict=True)
                    if length == self._block_size_bytes
                ]
        except Exception:
            logger.exception("loading chunks failed")
        there = set(loaded)
        missed = [OffloadKey(key) for _, key in pairs if key not in there]
        if missed:
            self._missed.put(missed)
        return JobResult(
            job.job_id,
            not missed,
            successful_keys=tuple(loaded),
            transfer_time=time.monotonic() - started,
            transfer_bytes=len(loaded) * self._block_size_bytes,
        )


def _identity(spec: Any, chunk_bytes: int, salt: str) -> tuple[str, dict[str, Any]]:
    """Return a model's name and everything that makes chunks of an offloading mean the same."""
    config = spec.config
    parallel = config.parallel
    model = str(config.model.name)
    return model, {
        "model": fingerprint(model),
        "dtype": str(config.model.dtype),
        "layout": str(config.kv_cache_layout),
        "canonical": bool(config.canonical_layout),
        "chunk_bytes": chunk_bytes,
        "blocks_per_chunk": spec.blocks_per_chunk,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "groups": [[group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "parallel": [
            parallel.tp_size,
            parallel.pp_size,
            parallel.pcp_size,
            parallel.dcp_size,
            parallel.rank,
        ],
        "hash_seed": os.environ.get("PYTHONHASHSEED", ""),
        "salt": salt,
    }
