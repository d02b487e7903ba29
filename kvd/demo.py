"""Shows the main job: a replay over both tiers, a kill -9 half-way, a restart, and no loss.

The last line printed is ``wrong bytes: N``; the exit status is 0 only when N is 0 and nothing
else failed.
"""

from __future__ import annotations

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from kvd import UnavailableError
from kvd.commands import readers
from kvd.commands.arguments import ToolParser
from kvd.machine_memory import free_bytes
from kvd.putting import UNAVAILABLE
from kvd.replay.daemon import DaemonError, scratch_daemon, scratch_parent
from kvd.replay.driver import LONG, MEMORY
from kvd.replay.generate import Shape, generate
from kvd.replay.interrupted import Half, InterruptedReplay, Reopening
from kvd.replay.report import console, narrow_table
from kvd.replay.room import free_disk_bytes, is_memory_backed
from tablespace import format_size

BLOCK_BYTES = 64 << 10
ARENA_BYTES = 1 << 30
REGION_BYTES = 2 << 30
SPARE_MEMORY_BYTES = 256 << 20
"""The daemon's index and both processes' own memory."""

SPARE_DISK_BYTES = 256 << 20
"""Journal and snapshots beside the containers."""

SEED = 2
REQUESTS = 4200
# 105,000 blocks, of which 41,000 are distinct (2.5 GiB): more than the arena before the kill,
# more than the region at the end, and prefixes that come back after the arena has lost them.
SHAPE = Shape(
    conversations=1500,
    concurrent=1000,
    turns=4,
    systems=8,
    system_tokens=2048,
    message_tokens=4000,
    reply_tokens=1000,
)


class DemoError(Exception):
    """Reports why the demo can't run or did not show what it must; the text has the remedy."""


def check_room(directory: Path) -> None:
    """Raise `DemoError` unless memory and disk suffice; the text names the remedy."""
    memory = ARENA_BYTES + SPARE_MEMORY_BYTES
    disk = REGION_BYTES + SPARE_DISK_BYTES
    if is_memory_backed(directory):
        memory += disk
    available, bound = free_bytes()
    if available < memory:
        raise DemoError(
            f"{bound} has {format_size(available)} of memory free and {format_size(memory)} are "
            "needed: stop something, or raise the cgroup's memory limit"
            + (f"; {directory} is in memory too, --dir names a disk" if memory > disk else "")
        )
    free = free_disk_bytes(directory)
    if free < disk:
        raise DemoError(
            f"{directory}: {format_size(free)} are free and {format_size(disk)} needed: free "
            "some, or name a directory on another disk by --dir"
        )


def show(before: Half, reopening: Reopening, after: Half) -> None:
    """Print the one table."""
    table = narrow_table(
        title=f"arena {format_size(ARENA_BYTES)}, region {format_size(REGION_BYTES)}, blocks of "
        f"{format_size(BLOCK_BYTES)}"
    )
    table.add_column("", no_wrap=True)
    table.add_column("before kill -9", justify="right")
    table.add_column("after", justify="right")

    def row(label: str, one: float, two: float) -> None:
        table.add_row(label, f"{one:,}", f"{two:,}")

    first, second = before.outcome, after.outcome
    row("requests", first.requests, second.requests)
    row("blocks looked up", first.references, second.references)
    row("hits in memory", first.tiers[MEMORY].hits, second.tiers[MEMORY].hits)
    row("hits on disk", first.tiers[LONG].hits, second.tiers[LONG].hits)
    row("misses", first.misses, second.misses)
    row("evicted from memory", before.counts.memory_evictions, after.counts.memory_evictions)
    row("evicted from disk", before.counts.long_evictions, after.counts.long_evictions)
    row("dropped", before.counts.dropped, after.counts.dropped)
    row("seconds", round(first.seconds, 1), round(second.seconds, 1))
    table.add_section()
    verdict = reopening.verdict
    table.add_row("blocks confirmed durable", f"{verdict.confirmed:,}", "")
    table.add_row("  recovered, read and equal", "", f"{verdict.found:,}")
    table.add_row("  evicted from disk since", "", f"{verdict.evicted:,}")
    table.add_row("  lost", "", f"{len(verdict.lost):,}")
    table.add_row("blocks caught unconfirmed", f"{reopening.unconfirmed:,}", "")
    table.add_row("entries in the reopened region", "", f"{reopening.entries:,}")
    table.add_row("seconds to reopen", "", f"{reopening.seconds:.2f}")
    table.add_row("  of these, recovering the region", "", f"{reopening.recovery_s:.2f}")
    console().print(table)


def complaints(
    before: Half, reopening: Reopening, after: Half, refusals: dict[str, int]
) -> list[str]:
    """Return what the demo should have shown and did not."""
    found: list[str] = []
    lost = len(reopening.verdict.lost)
    if lost:
        found.append(f"{lost} blocks confirmed durable were lost")
    if not reopening.verdict.found:
        found.append("no block was recovered")
    for label, half in (("before", before), ("after", after)):
        for tier, counts in half.outcome.tiers.items():
            if not counts.hits:
                found.append(f"no hits in the {tier} tier {label} the kill")
        if not half.counts.memory_evictions:
            found.append(f"nothing was evicted from memory {label} the kill")
    for reason, count in refusals.items():
        # While the daemon was dead nobody could store; any other reason is a failure.
        if reason != UNAVAILABLE:
            found.append(f"{count} blocks were not stored: {reason}")
    return found


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    found = ToolParser(
        prog="kvd demo",
        allow_abbrev=False,
        description="Start a daemon, replay a workload larger than its arena, kill -9 the daemon "
        "half-way, start it again, go on; every byte served is verified.",
    )
    found.add_argument(
        "--dir",
        type=readers.directory,
        metavar="DIR",
        help="make the temporary region below this directory (default: build/ of a checkout, "
        "else $TMPDIR or /var/tmp)",
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    arguments = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _on_terminate)
    logging.basicConfig(format="%(name)s: %(message)s")
    handlers = logging.getLogger().handlers[:]
    for handler in handlers:
        handler.addFilter(_as_planned)
    replay: InterruptedReplay | None = None
    failed = True
    try:
        directory = arguments.dir or _default_directory()
        check_room(directory)
        requests = list(generate(SHAPE, seed=SEED, limit=REQUESTS))
        with scratch_daemon(
            directory, max_bytes=ARENA_BYTES, long_bytes=REGION_BYTES, slot_bytes=BLOCK_BYTES
        ) as daemon:
            replay = InterruptedReplay(daemon, requests, BLOCK_BYTES)
            results = replay.run()
        show(*results)
        missing = complaints(*results, replay.refusals)
        for complaint in missing:
            print(f"kvd demo: {complaint}", file=sys.stderr)
        failed = bool(missing)
    except (DemoError, DaemonError, UnavailableError, OSError) as error:
        print(f"kvd demo: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("kvd demo: interrupted", file=sys.stderr)
    finally:
        for handler in handlers:
            handler.removeFilter(_as_planned)
    wrong = replay.wrong_bytes if replay is not None else 0
    sys.stderr.flush()
    print(f"wrong bytes: {wrong}", flush=True)
    return 1 if failed or wrong else 0


def _default_directory() -> Path:
    checkout = Path("pyproject.toml").is_file() and Path("kvd").is_dir()
    if not checkout:
        return scratch_parent()
    Path("build").mkdir(exist_ok=True)
    return Path("build")


def _as_planned(record: logging.LogRecord) -> bool:
    """Say of blocks that the killed daemon did not take that this was to be."""
    if (
        record.name == "kvd.client"
        and isinstance(record.args, tuple)
        and UNAVAILABLE in record.args
    ):
        record.name = "kvd demo"
        record.msg = "the daemon is killed, as planned; until it is back, lookups miss"
        record.args = ()
    return True


def _on_terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
