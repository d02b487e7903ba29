"""`CpuTieringSpec`: vLLM's own tiered offloading on a processor, where its worker refuses to run.

Manager, tiers and the shared region are vLLM's; only the copies between the engine's cache and
the region are done here, by torch. Used through ``spec_name`` and ``spec_module_path``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import torch
from vllm.v1.kv_offload.base import GPULoadStoreSpec, OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

# (block of the engine, chunk of the region, place of the block in the chunk, group)
Place = tuple[int, int, int, int]


class CopyingWorker(OffloadingWorker):
    """Copies at once, in the engine's thread."""

    def __init__(self, caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._groups = caches.group_data_refs
        self._engine = [
            each.tensor.view(torch.int8).view(-1, each.page_size_bytes) for each in caches.tensors
        ]
        self._host = [
            region.create_next_worker_view(each.page_size_bytes * blocks_per_chunk)
            for each in caches.tensors
        ]
        self._done: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, **more: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, False)

    def get_finished(self) -> list[TransferResult]:
        done, self._done = self._done, []
        return done

    def wait(self, job_ids: set[int]) -> None:
        pass

    def shutdown(self) -> None:
        self._host.clear()
        self._region.cleanup()

    def _copy(self, job_id: int, engine: GPULoadStoreSpec, host: Any, stores: bool) -> bool:
        started, copied = time.monotonic(), 0
        for block, chunk, place, group in self._places(engine, host):
            for ref in self._groups[group]:
                size = ref.page_size_bytes
                there = self._host[ref.tensor_idx][chunk, place * size : (place + 1) * size]
                here = self._engine[ref.tensor_idx][block, :size]
                if stores:
                    there.copy_(here)
                else:
                    here.copy_(there)
                copied += size
        self._done.append(TransferResult(job_id, True, copied, time.monotonic() - started))
        return True

    def _places(self, engine: GPULoadStoreSpec, host: Any) -> Iterator[Place]:
        blocks = [int(each) for each in engine.block_ids]
        chunks = [int(each) for each in host.block_ids]
        block = chunk = 0
        sizes = zip(engine.group_sizes, engine.block_indices, strict=True)
        for group, (count, first) in enumerate(sizes):
            skip = first % self._blocks_per_chunk if count else 0
            for number in range(skip, skip + count):
                at, place = divmod(number, self._blocks_per_chunk)
                yield blocks[block + number - skip], chunks[chunk + at], place, group
            block += count
            chunk += -(-(skip + count) // self._blocks_per_chunk)


class CpuTieringSpec(TieringOffloadingSpec):
    """As vLLM's, with a worker that runs here."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CopyingWorker(kv_caches, self.blocks_per_chunk, region)
        return self._worker
