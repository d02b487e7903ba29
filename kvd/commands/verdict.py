"""`kvd verdict`: whether the long tier pays on this traffic, and what to change."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec

from kvd.commands import arguments, running
from kvd.commands.status import counted
from kvd.results import Status
from tablespace import format_size

MIN_WRITTEN_BLOCKS = 1000  # Below it a verdict would speak of the first minutes.
PAYS_READS_PER_WRITE = 1.0  # A block written is then read back once: the write cost one read.
WASTE_FRACTION = 0.9


class Verdict(msgspec.Struct, frozen=True):
    """What the long tier was worth since the daemon started.

    `reads_per_write` is blocks served from it for each one written to it.
    """

    verdict: str
    reads_per_write: float
    written_blocks: int
    read_blocks: int
    written_bytes: int
    written_never_read_bytes: int
    never_read_fraction: float
    advice: list[str]


def main(argv: Sequence[str] | None = None) -> int:
    """Print the verdict; return 0, 1 when no daemon answers, 2 for usage."""
    return running.run("verdict", argv, _verdict)


def _verdict(argv: list[str]) -> int:
    parser = arguments.new_parser("verdict", __doc__)
    options, names = arguments.parse(parser, argv)
    if names:
        parser.error(f"{names[0]!r} is no option")
    found = judge(counted(options.socket, arguments.directories(options)))
    if options.json:
        running.show_json(found)
    else:
        sys.stdout.write("\n".join(_lines(found)) + "\n")
    return running.DONE


def judge(status: Status) -> Verdict:
    """Return what the counters of a status say."""
    written, read = status.written_blocks, status.read_blocks
    ratio = read / written if written else 0.0
    waste = status.written_never_read_bytes / status.written_bytes if status.written_bytes else 0.0
    if status.state != "running":
        word = "unknown"
        advice = ["a stopped region has no counters: ask the running daemon"]
    elif not any(each.state != "stopped" for each in status.health):
        word, advice = "unknown", ["there is no long tier: --long-path DIR adds one"]
    elif written < MIN_WRITTEN_BLOCKS:
        word = "too early"
        advice = [f"only {written} blocks were written; ask again after {MIN_WRITTEN_BLOCKS}"]
    else:
        word = "pays" if ratio >= PAYS_READS_PER_WRITE else "does not pay"
        advice = _advice(status, ratio, waste)
    return Verdict(
        word,
        round(ratio, 4),
        written,
        read,
        status.written_bytes,
        status.written_never_read_bytes,
        round(waste, 4),
        advice,
    )


def _advice(status: Status, ratio: float, waste: float) -> list[str]:
    said = []
    if ratio < PAYS_READS_PER_WRITE and waste >= WASTE_FRACTION:
        said.append(
            "most of what is written is never read: write blocks only when they are asked for a "
            "second time (--admission second-hit), or store them with retention short"
        )
    if ratio < PAYS_READS_PER_WRITE and status.evictions * 2 >= status.written_blocks:
        said.append("blocks leave before they are read: raise --long-bytes")
    if status.dropped:
        said.append(f"{status.dropped} blocks were dropped: the disk does not keep up")
    if status.rejected_writes:
        said.append(f"{status.rejected_writes} writes were rejected: raise a quota, or the budget")
    if ratio < PAYS_READS_PER_WRITE and not said:
        said.append(
            "memory serves what is asked for: a smaller --long-bytes, or none, costs nothing"
        )
    return said or ["nothing to change"]


def _lines(found: Verdict) -> list[str]:
    return [
        f"the long tier: {found.verdict}",
        f"  blocks read for each one written  {found.reads_per_write:.2f} "
        f"({found.read_blocks} of {found.written_blocks})",
        f"  written and never read            {format_size(found.written_never_read_bytes)} of "
        f"{format_size(found.written_bytes)} ({found.never_read_fraction:.0%})",
        *(f"  {advice}" for advice in found.advice),
    ]
