"""Shows the main job: a replay over both tiers, a kill -9 half-way, a restart, and no loss.

The last line printed is ``wrong bytes: N``; the exit status is 0 only when N is 0 and nothing
else failed.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import msgspec
from rich.table import Table

from kvd import Client, UnavailableError
from kvd.replay.connect import durable_of, namespace_name, wait_until_connected
from kvd.replay.counters import read_counts
from kvd.replay.daemon import Daemon, DaemonError, scratch_daemon, scratch_parent
from kvd.replay.driver import LONG, MEMORY, Driver, Outcome
from kvd.replay.generate import Shape, generate
from kvd.replay.killcheck import READ_TRIES
from kvd.replay.ledger import Ledger, Verdict
from kvd.replay.progress import Meter
from kvd.replay.report import DaemonCounts, console
from kvd.replay.room import available_memory_bytes, free_disk_bytes, is_memory_backed
from kvd.replay.trace import Request
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
# 120,000 blocks, of which 43,000 are distinct (2.6 GiB): more than the arena before the kill,
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
FLUSH_AT = 0.8
"""Share of the first half after which FLUSH is asked; LOCATE is asked just before the kill."""

FLUSH_TIMEOUT_S = 30.0


class DemoError(Exception):
    """Reports why the demo can't run or did not show what it must; the text has the remedy."""


class Half(msgspec.Struct, frozen=True):
    """One life of the daemon: what the driver and the daemon counted."""

    outcome: Outcome
    counts: DaemonCounts


class Reopening(msgspec.Struct, frozen=True):
    """What the restarted daemon had."""

    seconds: float
    recovery_s: float
    entries: int
    verdict: Verdict


class Demo:
    """The state that both halves share.

    Parameters
    ----------
    daemon : Daemon
        Not running yet.
    requests : list of Request
        The whole workload.
    """

    def __init__(self, daemon: Daemon, requests: list[Request]) -> None:
        self._daemon = daemon
        self._requests = requests
        self._name = namespace_name(BLOCK_BYTES)
        self._ledger = Ledger(self._name, daemon.region)
        self.wrong_bytes = 0

    def run(self) -> tuple[Half, Reopening, Half]:
        """Replay, kill, restart, verify, replay on."""
        cut = _index_at(self._requests, 0.5)
        flush = _index_at(self._requests, 0.5 * FLUSH_AT)
        self._daemon.start()
        # One client for both halves: it has to find the restarted daemon by itself.
        with Client(str(self._daemon.socket), block_bytes=BLOCK_BYTES) as client:
            before = self._half(client, "before the kill", self._requests[:cut], flush)
            self._daemon.kill()
            reopening = self._reopen()
            wait_until_connected(client)
            after = self._half(client, "after the kill", self._requests[cut:], None)
        self._daemon.stop()
        self._ledger.close()
        return before, reopening, after

    def _half(
        self, client: Client, label: str, requests: list[Request], flush_at: int | None
    ) -> Half:
        """Replay one half; with a flush position, end it by asking what is durable."""
        wait_until_connected(client)
        start = read_counts(client.stats())
        driver = Driver(client.namespace(self._name), BLOCK_BYTES, on_stored=self._ledger.store)

        def on_request(request: Request) -> None:
            meter.advance(len(request.hash_ids))
            if driver.outcome.requests == flush_at:
                self._confirm_by_flush(client)

        try:
            with Meter(label, sum(len(request.hash_ids) for request in requests)) as meter:
                outcome = driver.replay(requests, on_request=on_request)
        finally:
            # What was wrong is said on the last line also when the replay ends in an error.
            self.wrong_bytes += driver.outcome.wrong_bytes
        if flush_at is not None:
            waiting = self._ledger.waiting()
            position = self._ledger.position()
            self._ledger.confirm(durable_of(client, self._name, waiting), position)
        return Half(outcome, read_counts(client.stats()).since(start))

    def _confirm_by_flush(self, client: Client) -> None:
        waiting = self._ledger.waiting()
        position = self._ledger.position()
        flushed = client.flush(FLUSH_TIMEOUT_S)
        if flushed.dropped == 0 and flushed.pending == 0:
            self._ledger.confirm(waiting, position)

    def _reopen(self) -> Reopening:
        """Start the daemon again and read back every block it had confirmed."""
        seconds = self._daemon.start()
        with Client(str(self._daemon.socket), block_bytes=BLOCK_BYTES) as client:
            wait_until_connected(client)
            long = client.stats().long
            driver = Driver(client.namespace(self._name), BLOCK_BYTES)
            absent = self._ledger.confirmed()
            with Meter("reading confirmed blocks back", len(absent)) as meter:
                absent = driver.check(absent, on_batch=meter.advance)
            for _ in range(READ_TRIES - 1):
                absent = driver.check(absent)
        self.wrong_bytes += driver.outcome.wrong_bytes
        verdict = self._ledger.judge(absent)
        return Reopening(seconds, long.recovery_seconds, long.recovered_entries, verdict)


def _index_at(requests: Sequence[Request], share: float) -> int:
    """Return how many leading requests hold this share of all blocks."""
    total = sum(len(request.hash_ids) for request in requests)
    seen = 0
    for number, request in enumerate(requests):
        if seen >= share * total:
            return number
        seen += len(request.hash_ids)
    return len(requests)


def check_room(directory: Path) -> None:
    """Raise `DemoError` unless memory and disk suffice; the text names the remedy."""
    memory = ARENA_BYTES + SPARE_MEMORY_BYTES
    disk = REGION_BYTES + SPARE_DISK_BYTES
    if is_memory_backed(directory):
        memory += disk
    available = available_memory_bytes()
    if available is not None and available < memory:
        raise DemoError(
            f"{format_size(available)} of memory are available and {format_size(memory)} "
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
    table = Table(
        title=f"arena {format_size(ARENA_BYTES)}, region {format_size(REGION_BYTES)}, blocks of "
        f"{format_size(BLOCK_BYTES)}"
    )
    table.add_column("")
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
    table.add_row("entries in the reopened region", "", f"{reopening.entries:,}")
    table.add_row("seconds to reopen", "", f"{reopening.seconds:.2f}")
    table.add_row("  of these, recovering the region", "", f"{reopening.recovery_s:.2f}")
    console().print(table)


def complaints(before: Half, reopening: Reopening, after: Half) -> list[str]:
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
        if half.outcome.puts_refused:
            found.append(f"{half.outcome.puts_refused} blocks were refused {label} the kill")
    return found


def parser() -> argparse.ArgumentParser:
    """Return the command's argument parser."""
    found = argparse.ArgumentParser(
        prog="kvd demo",
        description="Start a daemon, replay a workload larger than its arena, kill -9 the daemon "
        "half-way, start it again, go on; every byte served is verified.",
    )
    found.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="make the temporary region below this directory (default: build/ of a checkout, "
        "else $TMPDIR or /var/tmp)",
    )
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo and return its exit status."""
    arguments = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _on_terminate)
    demo: Demo | None = None
    failed = True
    try:
        directory = arguments.dir or _default_directory()
        directory.mkdir(parents=True, exist_ok=True)
        check_room(directory)
        requests = list(generate(SHAPE, seed=SEED, limit=REQUESTS))
        with scratch_daemon(
            directory, max_bytes=ARENA_BYTES, long_bytes=REGION_BYTES, slot_bytes=BLOCK_BYTES
        ) as daemon:
            demo = Demo(daemon, requests)
            results = demo.run()
        show(*results)
        missing = complaints(*results)
        for complaint in missing:
            print(f"kvd demo: {complaint}", file=sys.stderr)
        failed = bool(missing)
    except (DemoError, DaemonError, UnavailableError, OSError) as error:
        print(f"kvd demo: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("kvd demo: interrupted", file=sys.stderr)
    wrong = demo.wrong_bytes if demo is not None else 0
    sys.stderr.flush()
    print(f"wrong bytes: {wrong}", flush=True)
    return 1 if failed or wrong else 0


def _default_directory() -> Path:
    checkout = Path("pyproject.toml").is_file() and Path("kvd").is_dir()
    return Path("build") if checkout else scratch_parent()


def _on_terminate(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    sys.exit(main())
