"""The counters as Prometheus metrics. Every number of STATS becomes one, whatever is added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from kvd import protocol
from kvd.durations import BOUNDS_S, Histogram, RequestTimes
from kvd.results import Stats

CONTENT_TYPE = CONTENT_TYPE_LATEST
MAX_NAMES = 100  # Of one metric's label: the largest; a name is a client's to choose.
TIERS = ("memory", "long")
# Sums that only grow while the daemon lives; every other number is a gauge.
COUNTERS = frozenset(
    {
        *("sets_stored", "sets_refreshed", "refused", "hits", "misses", "evictions", "expired"),
        *("no_room", "corrupt", "dropped", "bytes_in", "bytes_out", "blocks_written"),
        *("bytes_written", "blocks_promoted", "bytes_read", "reads_failed", "promotions_no_room"),
        *("reclaimed_bytes", "rejected_writes", "sets_refused"),
    }
)
# What a refused block may be told; a metric is there, and 0, before the first of them.
REASONS = (
    protocol.NO_ROOM,
    protocol.TOO_LARGE,
    protocol.EXPIRED,
    protocol.RETENTION_NONE,
    protocol.UNKNOWN_RESERVATION,
)

Labels = dict[str, str]


def render(stats: Stats, times: RequestTimes, moves: Mapping[str, Histogram]) -> bytes:
    """Return the text of /metrics.

    Parameters
    ----------
    moves : mapping of str to Histogram
        Moves between the tiers by name.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    registry.register(_Once([*_of_stats(stats.to_dict()), *_of_times(times, moves)]))
    return generate_latest(registry)


class _Once(Collector):
    """What was gathered, as the library wants it."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield it."""
        yield from self._families


def _of_stats(document: dict[str, Any]) -> list[Metric]:
    families: dict[str, Metric] = {}
    words: Labels = {}
    document["refused"] = dict.fromkeys(REASONS, 0) | document["refused"]
    for name, value in document.items():
        if name in TIERS:
            for field, inner in value.items():
                _add(families, words, f"tier_{field}", field, inner, {"tier": name})
        else:
            _add(families, words, name, name, value, {})
    about = InfoMetricFamily("kvd", "What was chosen at start.", value=words)
    return [about, *families.values()]


def _add(
    families: dict[str, Metric], words: Labels, name: str, field: str, value: Any, labels: Labels
) -> None:
    """Add one value of STATS, or each inside it."""
    if isinstance(value, str):
        words["_".join([*labels.values(), field])] = value
    elif isinstance(value, bool | int | float):
        _sample(families, name, field, float(value), labels)
    elif isinstance(value, dict):
        if field in ("write_back", "promotion"):
            for inner, number in value.items():
                _add(families, words, f"{name}_{inner}", inner, number, labels)
            return
        numbers = {key: each for key, each in value.items() if isinstance(each, int | float)}
        largest = sorted(numbers, key=lambda key: -numbers[key])[:MAX_NAMES]
        label = "reason" if field == "refused" else "name"
        for key in largest:
            _sample(families, name, field, float(numbers[key]), {**labels, label: key})


def _sample(
    families: dict[str, Metric], name: str, field: str, value: float, labels: Labels
) -> None:
    counts = field in COUNTERS or field.endswith("_total")
    full = f"kvd_{name.removesuffix('_total')}"
    family = families.get(full)
    if family is None:
        kind = CounterMetricFamily if counts else GaugeMetricFamily
        family = families[full] = kind(full, f"{field} of STATS.", labels=sorted(labels))
    family.add_metric([labels[key] for key in sorted(labels)], value)  # type: ignore[attr-defined]


def _of_times(times: RequestTimes, moves: Mapping[str, Histogram]) -> Iterator[Metric]:
    requests = HistogramMetricFamily(
        "kvd_request_seconds",
        "Time to answer a request; tier long: it waited for the long tier.",
        labels=["tier", "op"],
    )
    for tier, histograms in (("memory", times.from_memory), ("long", times.waited)):
        for kind, histogram in histograms.items():
            op = str(kind.__struct_config__.tag).lower()  # type: ignore[attr-defined]
            _histogram(requests, [tier, op], histogram)
    yield requests
    moved = HistogramMetricFamily(
        "kvd_move_seconds", "Time of a move between the tiers.", labels=["op"]
    )
    for op, histogram in moves.items():
        _histogram(moved, [op], histogram)
    yield moved


def _histogram(family: HistogramMetricFamily, labels: list[str], histogram: Histogram) -> None:
    # A copy: requests go on being counted while this is written.
    counts = list(accumulate(list(histogram.counts)))
    bounds = [*(f"{bound:g}" for bound in BOUNDS_S), "+Inf"]
    family.add_metric(
        labels, [(b, float(c)) for b, c in zip(bounds, counts, strict=True)], histogram.sum_s
    )
