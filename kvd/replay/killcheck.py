"""Kills a daemon at random moments of a replay and holds it to what it had confirmed.

Every round replays on from where the last one ended, asks now and then by FLUSH or LOCATE what
is durable, and kills the daemon at a random moment; some rounds kill the next one as well, while
it is still opening the region. The daemon that then starts must have every confirmed block that
its journal does not say was evicted since, and must serve no wrong byte of any block.

A kill leaves the page cache intact: this checks that every state of the process is recoverable,
not that syncs are in the right order.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence

import msgspec

from kvd import Client, UnavailableError
from kvd.replay.connect import durable_of, namespace_name, wait_until_connected
from kvd.replay.daemon import Daemon
from kvd.replay.driver import Driver
from kvd.replay.killer import Killer
from kvd.replay.ledger import Ledger
from kvd.replay.readback import read_back
from kvd.replay.sizes import BlockSizes, as_sizes
from kvd.replay.trace import Request

MIN_RUN_S = 0.05
OPENING_KILLS = 0.2
"""Share of the rounds that also kill the daemon while it opens."""

MAX_OPENING_S = 0.4
FLUSH_TIMEOUT_S = 30.0
MAX_REQUESTS_BETWEEN_CONFIRMATIONS = 12
PASS_SHIFT = 48
"""Bits by which ids of a later pass over the trace differ, so that it stores new blocks."""


class Round(msgspec.Struct, frozen=True):
    """One life of the daemon, its end, and what was found after."""

    number: int
    ran_s: float
    requests: int
    killed_opening: bool
    reopen_s: float
    confirmed: int
    found: int
    evicted: int
    lost: int
    wrong_bytes: int


class KillReport(msgspec.Struct, frozen=True):
    """All rounds of a check."""

    seed: int
    rounds: list[Round]

    @property
    def lost(self) -> int:
        """Confirmed blocks that were neither found nor evicted."""
        return sum(round_.lost for round_ in self.rounds)

    @property
    def wrong_bytes(self) -> int:
        """Bytes that were not what had been stored."""
        return sum(round_.wrong_bytes for round_ in self.rounds)


class KillCheck:
    """Runs rounds of replay, kill, restart and verification over one region.

    Parameters
    ----------
    daemon : Daemon
        Not running; it is left not running.
    requests : sequence of Request
        Replayed again and again, each pass under new ids.
    block_bytes : int or BlockSizes
        Size of the blocks.
    seed : int
        Chooses every moment and every confirmation.
    max_run_s : float
        Longest life of a daemon before its kill.
    connect : callable, optional
        Makes the client from the socket's path; a test may corrupt what it reads.
    """

    def __init__(
        self,
        daemon: Daemon,
        requests: Sequence[Request],
        block_bytes: int | BlockSizes,
        *,
        seed: int,
        max_run_s: float = 3.0,
        connect: Callable[[Daemon], Client] | None = None,
    ) -> None:
        self._daemon = daemon
        self._block_bytes = block_bytes
        self._random = random.Random(seed)
        self._seed = seed
        self._max_run_s = max_run_s
        self._connect = connect or self._plain_client
        self._stream = _passes(requests)
        self._name = namespace_name(block_bytes)
        self._ledger = Ledger(self._name, daemon.region)

    def run(self, rounds: int, on_round: Callable[[Round], None] | None = None) -> KillReport:
        """Run the rounds, then stop the daemon cleanly and verify once more.

        Raises
        ------
        DaemonError
            When a daemon does not start again, or ends by itself.
        """
        done: list[Round] = []
        self._daemon.start()
        try:
            for number in range(1, rounds + 1):
                done.append(self._round(number))
                if on_round is not None:
                    on_round(done[-1])
            done.append(self._clean_stop(rounds + 1))
            if on_round is not None:
                on_round(done[-1])
            self._daemon.stop()
        finally:
            self._daemon.close()
            self._ledger.close()
        return KillReport(self._seed, done)

    def _round(self, number: int) -> Round:
        run_s = self._random.uniform(MIN_RUN_S, self._max_run_s)
        requests, wrong_bytes = self._replay_until_killed(run_s)
        opening = self._random.random() < OPENING_KILLS
        if opening:
            self._daemon.spawn()
            time.sleep(self._random.uniform(0.0, MAX_OPENING_S))
            self._daemon.kill()
        return self._verify(number, run_s, requests, opening, wrong_bytes)

    def _clean_stop(self, number: int) -> Round:
        """Verify the promises over a clean stop too: it drains, and writes a snapshot."""
        self._daemon.stop()
        return self._verify(number, 0.0, 0, False, 0)

    def _replay_until_killed(self, run_s: float) -> tuple[int, int]:
        """Replay until the killer has struck; return requests and wrong bytes."""
        killer = Killer(self._daemon, run_s)
        with self._connect(self._daemon) as client:
            wait_until_connected(client)
            blocks = client.namespace(self._name)
            driver = Driver(blocks, self._block_bytes, on_stored=self._ledger.store)
            killer.start()
            try:
                while not killer.killed.is_set():
                    count = self._random.randint(1, MAX_REQUESTS_BETWEEN_CONFIRMATIONS)
                    some = itertools.islice(self._stream, count)
                    driver.replay(some, stop=killer.killed)
                    self._confirm(client)
            except UnavailableError:
                pass  # The kill came in the middle of a confirmation: nothing is confirmed.
            finally:
                killer.join()
        killer.raise_failure()
        return driver.outcome.requests, driver.outcome.wrong_bytes

    def _confirm(self, client: Client) -> None:
        """Ask which of the stored blocks are durable, by FLUSH or by LOCATE alone."""
        ledger = self._ledger
        waiting = ledger.waiting()
        if not waiting:
            return
        position = ledger.position()
        if self._random.random() < 0.5:
            flushed = client.flush(FLUSH_TIMEOUT_S)
            if flushed.dropped == 0 and flushed.pending == 0:
                ledger.confirm_stored(waiting)
                return
        ledger.confirm(durable_of(client, self._name, waiting), position)

    def _verify(
        self, number: int, run_s: float, requests: int, opening: bool, wrong_bytes: int
    ) -> Round:
        """Start the daemon again and hold it to the ledger."""
        ledger = self._ledger
        reopen_s = self._daemon.start()
        # A fresh client: what the old one still maps is the dead daemon's memory.
        with self._connect(self._daemon) as client:
            wait_until_connected(client)
            driver = Driver(client.namespace(self._name), self._block_bytes)
            driver.check(ledger.waiting())
            absent = read_back(client, self._name, driver, ledger.confirmed())
        ledger.forget_unconfirmed()
        verdict = ledger.judge(absent)
        return Round(
            number=number,
            ran_s=round(run_s, 3),
            requests=requests,
            killed_opening=opening,
            reopen_s=round(reopen_s, 3),
            confirmed=verdict.confirmed,
            found=verdict.found,
            evicted=verdict.evicted,
            lost=len(verdict.lost),
            wrong_bytes=wrong_bytes + driver.outcome.wrong_bytes,
        )

    def _plain_client(self, daemon: Daemon) -> Client:
        return Client(str(daemon.socket), block_bytes=as_sizes(self._block_bytes).largest)


def _passes(requests: Sequence[Request]) -> Iterator[Request]:
    """Yield the requests over and over, each pass under other ids."""
    for number in itertools.count():
        shift = number << PASS_SHIFT
        for request in requests:
            ids = [id_ ^ shift for id_ in request.hash_ids]
            yield msgspec.structs.replace(request, hash_ids=ids)
