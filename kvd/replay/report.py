"""Turns the counts of a replay into one table, or one JSON document."""

from __future__ import annotations

import math

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from kvd.replay.driver import LONG, MEMORY, Outcome
from kvd.replay.latency import Calls
from kvd.replay.sizes import BlockSizes, as_sizes
from tablespace import format_size

PERCENTS = (50.0, 95.0, 99.0)
PLAIN_WIDTH = 100
"""Columns of a table that does not go to a terminal."""


class Latency(msgspec.Struct, frozen=True):
    """Percentiles in microseconds; None where nothing was timed."""

    p50: float | None
    p95: float | None
    p99: float | None


class TierReport(msgspec.Struct, frozen=True):
    """What one tier did during a replay."""

    hits: int
    bytes: int
    evictions: int
    block_us: Latency
    batch_us: Latency


class PutReport(msgspec.Struct, frozen=True):
    """What became of the blocks that were stored."""

    stored: int
    refused: int
    refusals: dict[str, int]
    bytes: int
    block_us: Latency
    batch_us: Latency


class ReplayReport(msgspec.Struct, frozen=True):
    """One replay, as ``--json`` prints it."""

    source: str
    block_bytes: list[int]
    requests: int
    references: int
    seconds: float
    waited_s: float
    hits: int
    leading_hits: int
    misses: int
    hit_ratio: float
    tiers: dict[str, TierReport]
    puts: PutReport
    dropped: int
    wrong_bytes: int
    wrong_blocks: int
    wrong_ids: list[int]


class DaemonCounts(msgspec.Struct, frozen=True):
    """The daemon's own counters that a report needs, read before and after a replay."""

    memory_evictions: int = 0
    long_evictions: int = 0
    dropped: int = 0

    def since(self, before: DaemonCounts) -> DaemonCounts:
        """Return what was counted after ``before`` was read."""
        return DaemonCounts(
            memory_evictions=self.memory_evictions - before.memory_evictions,
            long_evictions=self.long_evictions - before.long_evictions,
            dropped=self.dropped - before.dropped,
        )


def _latency(found: list[float]) -> Latency:
    return Latency(*(None if math.isnan(value) else round(value, 2) for value in found))


def _block_us(calls: Calls) -> Latency:
    return _latency(calls.per_block_us(PERCENTS))


def _batch_us(calls: Calls) -> Latency:
    return _latency(calls.per_call_us(PERCENTS))


def build(
    outcome: Outcome,
    counts: DaemonCounts,
    refusals: dict[str, int],
    *,
    source: str,
    block_bytes: int | BlockSizes,
    waited_s: float = 0.0,
) -> ReplayReport:
    """Return the report of a replay.

    Parameters
    ----------
    outcome : Outcome
        What the driver counted.
    counts : DaemonCounts
        What the daemon counted meanwhile.
    refusals : dict of str to int
        Blocks that were not stored, by the client's reasons.
    source : str
        The trace's name, or how it was generated.
    block_bytes : int or BlockSizes
        Size of the blocks.
    waited_s : float
        Of the replay's seconds, those spent waiting for the disk to catch up.
    """
    evictions = {MEMORY: counts.memory_evictions, LONG: counts.long_evictions}
    return ReplayReport(
        source=source,
        block_bytes=as_sizes(block_bytes).all,
        requests=outcome.requests,
        references=outcome.references,
        seconds=round(outcome.seconds, 3),
        waited_s=round(waited_s, 3),
        hits=outcome.hits,
        leading_hits=outcome.leading_hits,
        misses=outcome.misses,
        hit_ratio=round(outcome.hits / max(1, outcome.references), 4),
        tiers={
            name: TierReport(
                hits=tier.hits,
                bytes=tier.bytes,
                evictions=evictions[name],
                block_us=_block_us(tier.calls),
                batch_us=_batch_us(tier.calls),
            )
            for name, tier in outcome.tiers.items()
        },
        puts=PutReport(
            stored=outcome.puts_stored,
            refused=outcome.puts_refused,
            refusals=refusals,
            bytes=outcome.put_bytes,
            block_us=_block_us(outcome.put_calls),
            batch_us=_batch_us(outcome.put_calls),
        ),
        dropped=counts.dropped,
        wrong_bytes=outcome.wrong_bytes,
        wrong_blocks=outcome.wrong_blocks,
        wrong_ids=outcome.wrong_ids,
    )


def as_json(report: ReplayReport) -> str:
    """Return the report as one JSON document."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def console() -> Console:
    """Return a console on standard output, wide enough for the tables when it is no terminal."""
    found = Console(highlight=False, markup=False)
    if not found.is_terminal:
        found = Console(highlight=False, markup=False, width=PLAIN_WIDTH)
    return found


def narrow_table(title: str, caption: str | None = None) -> Table:
    """Return a table with little ornament: nine columns of numbers have to fit 80 characters."""
    return Table(
        title=title, caption=caption, box=box.SIMPLE, pad_edge=False, collapse_padding=True
    )


def show(report: ReplayReport) -> None:
    """Print the report as one table."""
    size = BlockSizes(report.block_bytes[0], report.block_bytes[-1])
    table = narrow_table(
        title=f"{report.source}: {report.requests:,} requests, {report.references:,} blocks of "
        f"{size} in {report.seconds:.1f} s",
        caption="us: a call's time by its blocks; a call counts for the slowest tier it touched",
    )
    table.add_column("", no_wrap=True)
    for heading in ("blocks", "bytes", "evictions", "p50 us", "p95 us", "p99 us", "call p99 ms"):
        table.add_column(heading, justify="right")
    for name, tier in report.tiers.items():
        row = [f"{tier.hits:,}", format_size(tier.bytes), f"{tier.evictions:,}"]
        table.add_row(f"{name} hits", *row, *_cells(tier.block_us, tier.batch_us))
    puts = report.puts
    table.add_row("misses", f"{report.misses:,}")
    table.add_row(
        "stored",
        f"{puts.stored:,}",
        format_size(puts.bytes),
        "",
        *_cells(puts.block_us, puts.batch_us),
    )
    table.add_row("refused", f"{puts.refused:,}")
    table.add_section()
    table.add_row("hits", f"{report.hits:,}", f"{100 * report.hit_ratio:.2f} %")
    table.add_row("leading hits", f"{report.leading_hits:,}")
    table.add_row("dropped", f"{report.dropped:,}")
    table.add_row("disk wait", f"{report.waited_s:.1f} s")
    table.add_row("wrong bytes", f"{report.wrong_bytes:,}")
    output = console()
    output.print(table)
    for reason, count in puts.refusals.items():
        output.print(f"refused: {count:,} {reason}", soft_wrap=True)
    if report.wrong_bytes:
        output.print(
            f"wrong: {report.wrong_blocks:,} blocks, ids {report.wrong_ids}", soft_wrap=True
        )


def _cells(block: Latency, batch: Latency) -> list[str]:
    micros = ["-" if value is None else f"{value:,.1f}" for value in (block.p50, block.p95)]
    micros.append("-" if block.p99 is None else f"{block.p99:,.1f}")
    return [*micros, "-" if batch.p99 is None else f"{batch.p99 / 1e3:,.2f}"]
