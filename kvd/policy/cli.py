"""The command line of ``kvd size``: hit ratio against capacity."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich import box
from rich.console import Console
from rich.table import Table

from kvd import Client, UnavailableError
from kvd.commands import readers
from kvd.commands.arguments import ToolParser
from kvd.errors import ProtocolError
from kvd.policy.plot import PlotError, draw
from kvd.policy.rules import DEFAULT_POLICY, POLICIES
from kvd.policy.simulation import Row, distinct_blocks, simulate
from kvd.replay.trace import TraceError, read_trace

EXIT_DONE = 0
EXIT_REFUSED = 1
EXIT_USAGE = 2
DEFAULT_CAPACITIES = "2%,5%,10%,20%,50%,100%"


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    found = ToolParser(
        prog="kvd size",
        allow_abbrev=False,
        description="How many blocks are worth having: the share of references that an engine "
        "could use (hits before a request's first miss), against the cache's capacity.",
        epilog="Exit status: 0 done, 1 no daemon, 2 usage or an unusable trace.",
    )
    add = found.add_argument
    add("trace", nargs="?", metavar="TRACE", help="JSONL trace, as for kvd replay")
    add("--live", action="store_true", help="what the running daemon sampled, instead of a trace")
    add("--socket", metavar="PATH", help="the daemon of --live")
    add(
        "--policies",
        default=",".join(POLICIES),
        metavar="NAME,...",
        help=f"of {', '.join(POLICIES)} (default: all)",
    )
    add(
        "--capacities",
        metavar="SIZE,...",
        help="blocks, or shares of the trace's distinct blocks (default: "
        + DEFAULT_CAPACITIES.replace("%", "%%")
        + ", of these what is a block or more)",
    )
    add(
        "--requests",
        type=readers.count,
        metavar="N",
        help="only the first N requests of the trace",
    )
    add("--json", action="store_true", help="print one array of rows instead of a table")
    add(
        "--plot",
        type=Path,
        metavar="FILE",
        help="also draw it: .html, .svg, or .png by matplotlib",
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvd size`` and return its exit status."""
    options = parser()
    arguments = options.parse_args(argv)
    if (arguments.trace is None) != arguments.live:
        options.error("name a TRACE, or give --live")
    if arguments.socket is not None and not arguments.live:
        options.error("--socket is for --live")
    try:
        rows = _live(arguments) if arguments.live else _of_trace(arguments)
        if arguments.plot is not None:
            draw(rows, arguments.plot, _title(arguments))
    except (TraceError, PlotError, ValueError) as error:
        print(f"kvd size: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (UnavailableError, ProtocolError, OSError) as error:
        print(f"kvd size: {error}", file=sys.stderr)
        return EXIT_REFUSED
    if arguments.json:
        print(msgspec.json.encode(rows).decode())
    else:
        _show(rows, _title(arguments))
    return EXIT_DONE


def _of_trace(arguments: argparse.Namespace) -> list[Row]:
    policies = arguments.policies.split(",")
    for policy in policies:
        if policy not in POLICIES:
            raise ValueError(f"--policies {policy}: choose from {', '.join(POLICIES)}")
    requests = [request.hash_ids for request in read_trace(arguments.trace, arguments.requests)]
    distinct = distinct_blocks(requests)
    if not distinct:
        raise ValueError(f"{arguments.trace}: its requests have no blocks; name another trace")
    if arguments.capacities is None:
        capacities = default_capacities(distinct)
    else:
        capacities = [parse_capacity(text, distinct) for text in arguments.capacities.split(",")]
    return [simulate(policy, capacity, requests) for policy in policies for capacity in capacities]


def default_capacities(distinct: int) -> list[int]:
    """Return the usual shares of the distinct blocks: of a small trace those that are a block."""
    shares = [int(float(text[:-1]) / 100 * distinct) for text in DEFAULT_CAPACITIES.split(",")]
    return sorted({share for share in shares if share})


def parse_capacity(text: str, distinct: int) -> int:
    """Return the blocks that a capacity means: a count, or a share of the distinct blocks."""
    try:
        if text.endswith("%"):
            capacity = int(float(text[:-1]) / 100 * distinct)
        else:
            capacity = int(text)
    except ValueError:
        raise ValueError(f"--capacities {text}: write a count of blocks, or a share: 5%") from None
    if capacity < 1:
        raise ValueError(f"--capacities {text}: that is no block of the {distinct} distinct ones")
    return capacity


def _live(arguments: argparse.Namespace) -> list[Row]:
    with Client(arguments.socket) as client:
        return client.stats().curve


def _title(arguments: argparse.Namespace) -> str:
    return "live" if arguments.live else Path(arguments.trace).name


def _show(rows: Sequence[Row], title: str) -> None:
    table = Table(title=title, box=box.SIMPLE, pad_edge=False)
    for heading in ("policy", "capacity", "requested", "leading hits", "hit ratio"):
        table.add_column(heading, justify="left" if heading == "policy" else "right")
    for row in rows:
        best = max(each.hit_ratio for each in rows if each.capacity_blocks == row.capacity_blocks)
        table.add_row(
            row.policy,
            f"{row.capacity_blocks:,}",
            f"{row.requested_blocks:,}",
            f"{row.leading_hits:,}",
            f"{row.hit_ratio:.4f}",
            style="bold" if row.hit_ratio == best and row.policy == DEFAULT_POLICY else "",
        )
    Console(highlight=False, markup=False).print(table)
