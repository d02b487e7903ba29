"""A replay interrupted by a kill -9: what each half did, and what the restart brought back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kvd import Client
from kvd.replay.backlog import Backlog
from kvd.replay.connect import (
    durable_of,
    namespace_name,
    wait_until_connected,
    wait_until_populated,
)
from kvd.replay.counters import read_counts
from kvd.replay.daemon import Daemon
from kvd.replay.driver import Driver, Outcome
from kvd.replay.killer import Killer
from kvd.replay.ledger import Ledger, Verdict
from kvd.replay.progress import Meter
from kvd.replay.readback import read_back
from kvd.replay.report import DaemonCounts
from kvd.replay.sizes import BlockSizes, as_sizes
from kvd.replay.trace import Request

FLUSH_AT = 0.8
"""Share of the first half after which FLUSH is asked; LOCATE is asked just before the kill."""

FLUSH_TIMEOUT_S = 30.0
REQUESTS_AFTER_LOCATE = 5
"""Requests between LOCATE and the kill: their blocks may get lost, and mostly do not."""


class Half(msgspec.Struct, frozen=True):
    """One life of the daemon: what the driver and the daemon counted."""

    outcome: Outcome
    counts: DaemonCounts


class Reopening(msgspec.Struct, frozen=True):
    """What the restarted daemon had."""

    unconfirmed: int
    seconds: float
    recovery_s: float
    entries: int
    verdict: Verdict


class InterruptedReplay:
    """Both halves of a replay, and the restart between them.

    Parameters
    ----------
    daemon : Daemon
        Not running yet.
    requests : list of Request
        The whole workload.
    block_bytes : int or BlockSizes
        Size of its blocks.

    Attributes
    ----------
    wrong_bytes : int
        Of everything read so far, also when `run` ends in an error.
    refusals : dict of str to int
        Blocks the client could not store, by reason.
    """

    def __init__(
        self, daemon: Daemon, requests: list[Request], block_bytes: int | BlockSizes
    ) -> None:
        self._daemon = daemon
        self._requests = requests
        self._block_bytes = block_bytes
        self._name = namespace_name(block_bytes)
        self.refusals: dict[str, int] = {}
        self._ledger = Ledger(self._name, daemon.region)
        self.wrong_bytes = 0

    def run(self) -> tuple[Half, Reopening, Half]:
        """Replay, kill, restart, verify, replay on."""
        stream = iter(self._requests)
        self._daemon.start()
        # One client for both halves: it has to find the restarted daemon by itself.
        with Client(
            str(self._daemon.socket), block_bytes=as_sizes(self._block_bytes).largest
        ) as client:
            before = self._until_killed(client, stream)
            reopening = self._reopen()
            wait_until_connected(client)
            after = self._to_the_end(client, stream)
            self.refusals = dict(client.refusals)
        self._daemon.stop()
        self._ledger.close()
        return before, reopening, after

    def _until_killed(self, client: Client, stream: Iterator[Request]) -> Half:
        """Replay until the killer has struck, in the middle of the work.

        The daemon's counters are those of the last time it was asked, just before.
        """
        half = _index_at(self._requests, 0.5)
        flush_at = _index_at(self._requests, 0.5 * FLUSH_AT)
        locate_at = half - REQUESTS_AFTER_LOCATE
        killer = Killer(self._daemon)
        driver = self._driver(client)
        start = read_counts(client.stats())
        counts = start

        def on_request(request: Request) -> None:
            nonlocal counts
            meter.advance()
            done = driver.outcome.requests
            if done == flush_at:
                self._confirm_by_flush(client)
            elif done == locate_at:
                self._confirm_by_locate(client)
                counts = read_counts(client.stats()).since(start)
            elif done == half:
                killer.due.set()

        killer.start()
        try:
            with Meter("before the kill", half) as meter:
                outcome = driver.replay(stream, stop=killer.killed, on_request=on_request)
        finally:
            killer.finish()
            self.wrong_bytes += driver.outcome.wrong_bytes
        killer.raise_failure()
        return Half(outcome, counts)

    def _to_the_end(self, client: Client, stream: Iterator[Request]) -> Half:
        driver = self._driver(client)
        start = read_counts(client.stats())
        left = list(stream)
        try:
            with Meter("after the kill", len(left)) as meter:
                outcome = driver.replay(left, on_request=lambda request: meter.advance())
        finally:
            self.wrong_bytes += driver.outcome.wrong_bytes
        return Half(outcome, read_counts(client.stats()).since(start))

    def _driver(self, client: Client) -> Driver:
        wait_until_connected(client)
        wait_until_populated(client)
        backlog = Backlog(client, self._block_bytes)

        def on_stored(hash_ids: list[int]) -> None:
            self._ledger.store(hash_ids)
            backlog.store(hash_ids)

        blocks = client.namespace(self._name)
        return Driver(blocks, self._block_bytes, on_stored=on_stored)

    def _confirm_by_flush(self, client: Client) -> None:
        waiting = self._ledger.waiting()
        flushed = client.flush(FLUSH_TIMEOUT_S)
        if flushed.dropped == 0 and flushed.pending == 0:
            self._ledger.confirm_stored(waiting)

    def _confirm_by_locate(self, client: Client) -> None:
        waiting = self._ledger.waiting()
        position = self._ledger.position()
        self._ledger.confirm(durable_of(client, self._name, waiting), position)

    def _reopen(self) -> Reopening:
        """Start the daemon again and read back every block it had confirmed."""
        unconfirmed = self._ledger.waiting()
        self._ledger.forget_unconfirmed()
        seconds = self._daemon.start()
        with Client(
            str(self._daemon.socket), block_bytes=as_sizes(self._block_bytes).largest
        ) as client:
            wait_until_connected(client)
            long = client.stats().long
            driver = Driver(client.namespace(self._name), self._block_bytes)
            confirmed = self._ledger.confirmed()
            try:
                with Meter("reading confirmed blocks back", len(confirmed)) as meter:
                    absent = read_back(
                        client, self._name, driver, confirmed, on_batch=meter.advance
                    )
                # Present or not, both are right; wrong they may not be.
                driver.check(unconfirmed)
            finally:
                self.wrong_bytes += driver.outcome.wrong_bytes
        return Reopening(
            unconfirmed=len(unconfirmed),
            seconds=seconds,
            recovery_s=long.recovery_seconds,
            entries=long.recovered_entries,
            verdict=self._ledger.judge(absent),
        )


def _index_at(requests: Sequence[Request], share: float) -> int:
    """Return how many leading requests hold this share of all blocks."""
    total = sum(len(request.hash_ids) for request in requests)
    seen = 0
    for number, request in enumerate(requests):
        if seen >= share * total:
            return number
        seen += len(request.hash_ids)
    return len(requests)
