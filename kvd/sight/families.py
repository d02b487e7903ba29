"""The counters as Prometheus metrics. Every number of STATS becomes one, whatever is added."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import msgspec
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
from kvd.results import ClassUse, Stats, Status
from kvd.sight.descriptions import describe

CONTENT_TYPE = CONTENT_TYPE_LATEST
MAX_NAMES = 100  # Of one metric's label: the largest; a name is a client's to choose.
TIERS = ("memory", "long")
# Sums that only grow while the daemon lives; every other number is a gauge.
COUNTERS = frozenset(
    {
        *("sets_stored", "sets_refreshed", "refused", "hits", "misses", "evictions", "expired"),
        *("no_room", "corrupt", "dropped", "bytes_in", "bytes_out", "blocks_written"),
        *("bytes_written", "blocks_promoted", "bytes_read", "reads_failed", "promotions_no_room"),
        *("reclaimed_bytes", "rejected_writes", "sets_refused", "rejected", "dropped_by"),
        *("admitted", "not_admitted", "scrubbed_values", "scrubbed_bytes", "scrub_damaged"),
        *("failures", "reopened", "rejected_by_namespace", "slabs_taken"),
    }
)
SAID_BY_STATS = frozenset(
    {"version", "pid", "uptime_s", "notes", "tiers", "choices", "memory_classes"}
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


def render(
    stats: Stats, status: Status, times: RequestTimes, moves: Mapping[str, Histogram]
) -> bytes:
    """Return the text of /metrics.

    Parameters
    ----------
    moves : mapping of str to Histogram
        Moves between the tiers by name.
    """
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    families = [*stats_families(stats), *status_families(status), *time_families(times, moves)]
    registry.register(_Once(families))
    return generate_latest(registry)


class _Once(Collector):
    """What was gathered, as the library wants it."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """Yield it."""
        yield from self._families


def stats_families(stats: Stats) -> list[Metric]:
    """Return the metrics of a STATS: its numbers, however deep they lie.

    What is in `memory` or `long` has the label `tier`, an element of a list of structs that have
    a `path` the label `path`, a size class the label `slot_bytes`, a member of a mapping the
    label `name` (of refusals `reason`).
    """
    families: dict[str, Metric] = {}
    words: Labels = {}
    for name in stats.__struct_fields__:
        value = getattr(stats, name)
        if name in TIERS:
            _add_struct(families, words, "tier", value, {"tier": name})
        else:
            _add(families, words, name, name, value, {})
    about = InfoMetricFamily("kvd", "What was chosen at start.", value=words)
    return [about, *families.values()]


def status_families(status: Status) -> list[Metric]:
    """Return the metrics of a status: the budget, and what each namespace has of it."""
    families: dict[str, Metric] = {}
    for field in status.__struct_fields__:
        if field not in SAID_BY_STATS:
            _add(families, {}, f"status_{field}", field, getattr(status, field), {})
    return list(families.values())


def _add_struct(
    families: dict[str, Metric], words: Labels, prefix: str, struct: Any, labels: Labels
) -> None:
    for field in struct.__struct_fields__:
        _add(families, words, f"{prefix}_{field}", field, getattr(struct, field), labels)


def _add(
    families: dict[str, Metric], words: Labels, name: str, field: str, value: Any, labels: Labels
) -> None:
    """Add one value of STATS, or each inside it."""
    if isinstance(value, str):
        if "path" not in labels:
            words["_".join([*labels.values(), field])] = value
    elif isinstance(value, bool | int | float):
        _family(families, name, field, labels).add_metric(_in_order(labels), float(value))
    elif isinstance(value, msgspec.Struct):
        _add_struct(families, words, name, value, labels)
    elif isinstance(value, list):
        for each in value:
            if isinstance(each, ClassUse):
                own = {**labels, "slot_bytes": str(each.slot_bytes)}
                _add_struct(families, words, name, each, own)
            elif isinstance(each, msgspec.Struct) and hasattr(each, "path"):
                _add_struct(families, words, name, each, {**labels, "path": str(each.path)})
    elif isinstance(value, dict):
        _add_mapping(families, name, field, value, labels)


def _add_mapping(
    families: dict[str, Metric], name: str, field: str, value: dict[str, Any], labels: Labels
) -> None:
    numbers = {key: each for key, each in value.items() if isinstance(each, int | float)}
    label = "name"
    if field in ("refused", "dropped_by"):
        label = "reason"
    if field == "refused":
        numbers = dict.fromkeys(REASONS, 0) | numbers
    elif len(numbers) < len(value):
        return
    # There, with its HELP, also while it has no member.
    family = _family(families, name, field, {**labels, label: ""})
    for key in sorted(numbers, key=lambda key: -numbers[key])[:MAX_NAMES]:
        family.add_metric(_in_order({**labels, label: key}), float(numbers[key]))


def _in_order(labels: Labels) -> list[str]:
    return [labels[key] for key in sorted(labels)]


def _family(families: dict[str, Metric], name: str, field: str, labels: Labels) -> Any:
    full = f"kvd_{name.removesuffix('_total')}"
    if full not in families:
        counts = field in COUNTERS or field.endswith("_total")
        kind = CounterMetricFamily if counts else GaugeMetricFamily
        families[full] = kind(full, describe(field), labels=sorted(labels))
    return families[full]


def time_families(times: RequestTimes, moves: Mapping[str, Histogram]) -> Iterator[Metric]:
    """Return the metrics of how long requests and moves took."""
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
