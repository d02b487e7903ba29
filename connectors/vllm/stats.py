"""The connector's counters in the engine's log and among its Prometheus metrics."""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvd_connectors.vllm.counts import NAMES


class KvdStats(KVConnectorStats):
    """Counts by name; see `kvd_connectors.vllm.counts.NAMES`."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KvdStats:
        """Add another's counts."""
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        """Return the counts."""
        return dict(self.data)

    def is_empty(self) -> bool:
        """Say whether nothing was counted."""
        return not any(self.data.values())


class KvdPromMetrics(KVConnectorPromMetrics):
    """A counter for each name, ``vllm:kvd_NAME``."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._by_name = {
            name: self._for_each_engine(name, meaning) for name, meaning in NAMES.items()
        }

    def _for_each_engine(self, name: str, meaning: str) -> dict[int, Any]:
        # By its labels and nothing of vLLM's helpers, which move between its versions.
        counter: Any = self._counter_cls(
            name=f"vllm:kvd_{name}",
            documentation=f"kvd: {meaning}.",
            labelnames=self._labelnames,
        )
        return {
            engine: counter.labels(*values)
            for engine, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted since the last time."""
        for name, count in transfer_stats_data.items():
            if name in self._by_name and count:
                self._by_name[name][engine_idx].inc(count)
