"""The soak itself: clients at work, some killed, the daemon restarted, its accounts compared."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tablespace
from kvd import Client, protocol
from kvd.replay.buffers import BlockBuffers
from kvd.replay.connect import wait_until_connected, wait_until_populated
from kvd.replay.daemon import Daemon
from kvd.results import Stats
from kvd.soak import books, gauges
from kvd.soak.blocks import SPACES, BlockId, SoakBlocks, name_of
from kvd.soak.board import Cell
from kvd.soak.clients import WORKER, Clients
from kvd.soak.report import STEADY_FROM, Sample, SoakReport, growth, steady_problems

FILLED = 0.9
"""Share of the region that is full before the first client starts."""

OVERSUBSCRIBED = 1.5
"""Distinct blocks of all namespaces, as a multiple of the region's slots."""

FILL_BATCH = 64
FILL_S = 600.0
SAMPLE_S = 5.0
REST_S = 30.0
POLL_S = 0.05
MAX_PROBLEMS = 50
MAX_CHECK_SHARE = 1 / 5
"""Of the run, between two comparisons at rest; a minute at most."""


@dataclass(frozen=True)
class Settings:
    """How long, with how many clients and restarts, in which order of events."""

    minutes: float
    clients: int
    restarts: int
    seed: int
    block_bytes: int
    kill_every_s: float = 5.0
    fail_fast: bool = False


class Soak:
    """One run over a daemon of one's own.

    Parameters
    ----------
    daemon : Daemon
        Not running; it is left not running.
    directory : pathlib.Path
        Scratch space.
    settings : Settings
        What to do.
    client_command : sequence of str
        Runs a client; another one in a test of the soak.
    """

    def __init__(
        self,
        daemon: Daemon,
        directory: Path,
        settings: Settings,
        *,
        client_command: Sequence[str] = WORKER,
    ) -> None:
        self._daemon = daemon
        self._directory = directory
        self._settings = settings
        self._client_command = client_command
        self._random = random.Random(settings.seed)
        self._slot_bytes = settings.block_bytes
        self._samples: list[Sample] = []
        self._problems: list[str] = []
        self._restarts: list[str] = []
        self._checks = self._checks_at_rest = 0
        self._life = 1
        self._sums: Counter[str] = Counter()

    def run(self, on_progress: Callable[[int], None] = lambda seconds: None) -> SoakReport:
        """Run to the end and return what was found.

        Parameters
        ----------
        on_progress : callable, optional
            Told the whole seconds that passed since the last call, of `minutes`.

        Raises
        ------
        DaemonError
            The daemon does not start, or ended by itself.
        """
        self._daemon.start()
        clients: Clients | None = None
        try:
            with Client(str(self._daemon.socket), map_arena=False) as watcher:
                wait_until_connected(watcher)
                wait_until_populated(watcher)
                block_count = self._fill(watcher)
                clients = Clients(
                    self._directory,
                    self._settings.clients,
                    socket=self._daemon.socket,
                    arguments=(self._settings.block_bytes, block_count),
                    source=self._random,
                    command=self._client_command,
                )
                clients.start()
                self._play(watcher, clients, on_progress)
                self._note(clients.end())
                self._check_at_rest(watcher)
                self._end_of_life(watcher)
            self._daemon.stop()
            self._check_region()
        finally:
            if clients is not None:
                clients.close()
            self._daemon.close()
        return self._report(clients)

    # -- before --------------------------------------------------------------------------------

    def _fill(self, watcher: Client) -> int:
        """Fill the region; return how many distinct blocks a namespace gets."""
        size = self._settings.block_bytes
        region_slots = watcher.stats().long.capacity_slots
        wanted = int(region_slots * FILLED)
        block_count = int(region_slots * OVERSUBSCRIBED / SPACES)
        blocks = SoakBlocks(size)
        buffers = BlockBuffers(size, FILL_BATCH)
        deadline = time.monotonic() + FILL_S
        # The hot ones come last: they are what memory holds when the clients start.
        order = [
            BlockId(number % SPACES, number // SPACES)
            for number in reversed(range(block_count * SPACES))
        ][-wanted:]
        with Client(str(self._daemon.socket), block_bytes=size) as client:
            handles = [client.namespace(name_of(space)) for space in range(SPACES)]
            for first in range(0, len(order), FILL_BATCH):
                part = order[first : first + FILL_BATCH]
                for space in range(SPACES):
                    items = [
                        (block.key, blocks.fill(block, words))
                        for block, words in zip(part, buffers.words, strict=False)
                        if block.space == space
                    ]
                    while items and not all(handles[space].put_many(items)):
                        if time.monotonic() > deadline:
                            raise TimeoutError(f"the region was not filled in {FILL_S:.0f} s")
                client.flush(REST_S)
        return block_count

    # -- at work -------------------------------------------------------------------------------

    def _play(self, watcher: Client, clients: Clients, on_progress: Callable[[int], None]) -> None:
        settings = self._settings
        began = time.monotonic()
        length_s = settings.minutes * 60
        restarts = self._restart_times(length_s)
        every_s = min(60.0, length_s * MAX_CHECK_SHARE)
        next_kill, next_sample, next_check = settings.kill_every_s, 0.0, every_s
        told = 0
        while (now := time.monotonic() - began) < length_s and not self._is_lost(clients):
            on_progress(int(now) - told)
            told = int(now)
            self._note(clients.ended())
            if restarts and now >= restarts[0]:
                restarts.pop(0)
                self._restart(watcher)
            elif now >= next_check:
                next_check = now + every_s
                self._note([clients.pause(lambda: None)])
                self._check_at_rest(watcher, now / 60)
                clients.resume()
            elif now >= next_kill:
                next_kill = now + self._random.expovariate(1 / settings.kill_every_s)
                clients.kill_one()
            elif now >= next_sample:
                next_sample = now + min(SAMPLE_S, every_s)
                self._look(watcher, now / 60)
            time.sleep(POLL_S)
        on_progress(int(length_s) - told)

    def _is_lost(self, clients: Clients) -> bool:
        wrong = bool(self._problems) or clients.board.total(Cell.WRONG_BYTES) > 0
        return self._settings.fail_fast and wrong

    def _restart_times(self, length_s: float) -> list[float]:
        """Return when the daemon is restarted: early, so that its last life is long."""
        count = self._settings.restarts
        step = length_s * STEADY_FROM / (count + 1)
        return [step * (number + self._random.uniform(0.6, 1.0)) for number in range(count)]

    def _restart(self, watcher: Client) -> None:
        """End the daemon in one of the two ways, in turn, and start it again."""
        self._end_of_life(watcher)
        how = ("kill -9", "SIGTERM")[len(self._restarts) % 2]
        self._restarts.append(how)
        if how == "kill -9":
            self._daemon.kill()
        else:
            self._daemon.stop()
        self._daemon.start()
        self._life += 1
        wait_until_connected(watcher)
        wait_until_populated(watcher)
        time.sleep(POLL_S)  # For what was populated last to be counted as free.

    # -- looking -------------------------------------------------------------------------------

    def _look(self, watcher: Client, minute: float) -> None:
        """Compare the sums that hold at every moment."""
        stats = watcher.stats()
        self._checks += 1
        self._note(books.slots_do_not_add_up(stats))
        self._sample(stats, minute, at_rest=False)

    def _check_at_rest(self, watcher: Client, minute: float | None = None) -> None:
        """Compare all accounts, once nothing moves and they agree."""
        deadline = time.monotonic() + REST_S
        while True:
            stats = watcher.stats()
            status = watcher.ask(protocol.StatusRequest(), protocol.StatusReply).status
            self._note(books.slots_do_not_add_up(stats))
            # What the daemon does by itself, such as writing shorter times to live, is between
            # two questions; what is wrong stays wrong.
            wrong = [
                *(f"after {REST_S:.0f} s of rest still {each}" for each in books.unrest(stats)),
                *books.books_do_not_agree(stats, status, self._slot_bytes),
            ]
            if not wrong or time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        self._checks_at_rest += 1
        self._note(wrong)
        self._note(books.damage(stats.memory, stats.long))
        if minute is not None:
            self._sample(stats, minute, at_rest=True)

    def _sample(self, stats: Stats, minute: float, *, at_rest: bool) -> None:
        found = gauges.look(stats.pid)
        long = stats.long
        self._samples.append(
            Sample(
                minute=round(minute, 3),
                life=self._life,
                at_rest=at_rest,
                rss_bytes=found.rss_bytes,
                anonymous_bytes=found.anonymous_bytes,
                threads=found.threads,
                descriptors=found.descriptors,
                sessions=stats.sessions,
                entries=long.entries,
                used_bytes=long.used_bytes,
                usage_fraction=round(long.used_bytes / max(1, long.max_bytes), 4),
            )
        )

    def _end_of_life(self, watcher: Client) -> None:
        """Take over the sums of a daemon that is about to end."""
        stats = watcher.stats()
        self._sums["evictions"] += stats.long.evictions
        self._sums["blocks_written"] += stats.long.blocks_written
        self._sums["blocks_promoted"] += stats.long.blocks_promoted
        if stats.errors_total:
            self._note([f"the daemon answered {stats.errors_total} requests with ERROR"])

    # -- after ---------------------------------------------------------------------------------

    def _check_region(self) -> None:
        """Read every value of the region that the daemon left."""
        found = tablespace.check(self._daemon.region)
        if not found.accounting_exact:
            self._note([f"the region's accounts are not exact after the stop: {found.slots}"])
        if found.damaged_files or found.damaged_values:
            self._note(
                [
                    f"damaged in the region after the stop: {len(found.damaged_files)} places of "
                    f"files, {len(found.damaged_values)} values"
                ]
            )
        if "Traceback" in self._daemon.log.read_text(errors="replace"):
            self._note(["there is a Traceback in the daemon's log"])

    def _note(self, problems: Iterable[str]) -> None:
        for problem in problems:
            if problem and len(self._problems) < MAX_PROBLEMS:
                self._problems.append(problem)

    def _report(self, clients: Clients) -> SoakReport:
        board, minutes = clients.board, self._settings.minutes
        wrong_bytes = board.total(Cell.WRONG_BYTES)
        if wrong_bytes:
            self._note([f"{wrong_bytes} wrong bytes: {clients.tail()}"])
        self._note(steady_problems(self._samples, minutes))
        grown = growth(self._samples, minutes)
        return SoakReport(
            seed=self._settings.seed,
            minutes=minutes,
            clients=self._settings.clients,
            clients_killed=clients.killed,
            restarts=self._restarts,
            calls=board.total(Cell.CALLS),
            stored=board.total(Cell.STORED),
            refused=board.total(Cell.REFUSED),
            hits=board.total(Cell.HITS),
            misses=board.total(Cell.MISSES),
            leased=board.total(Cell.LEASED),
            deleted=board.total(Cell.DELETED),
            unavailable=board.total(Cell.UNAVAILABLE),
            checked_bytes=board.total(Cell.CHECKED_BYTES),
            wrong_bytes=wrong_bytes,
            wrong_blocks=board.total(Cell.WRONG_BLOCKS),
            evictions=self._sums["evictions"],
            blocks_written=self._sums["blocks_written"],
            blocks_promoted=self._sums["blocks_promoted"],
            checks=self._checks,
            checks_at_rest=self._checks_at_rest,
            rss_bytes_before=grown.rss_before if grown is not None else None,
            rss_bytes_after=grown.rss_after if grown is not None else None,
            rss_growth=grown.rss if grown is not None else None,
            anonymous_growth=grown.anonymous if grown is not None else None,
            descriptors_at_rest=[each.descriptors for each in self._samples if each.at_rest],
            usage_fractions=[
                min((each.usage_fraction for each in self._samples), default=0.0),
                max((each.usage_fraction for each in self._samples), default=0.0),
            ],
            samples=self._samples,
            problems=self._problems,
        )
