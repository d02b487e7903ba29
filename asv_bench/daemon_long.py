"""The long tier: reads that end in memory, and writes behind the requests."""

from __future__ import annotations

import threading
import time

import roofline
from daemon_hits import Reader
from daemon_rows import Row, make, percentile, ratio
from daemon_setup import (
    ANSWER_S,
    SLOT,
    SPACE,
    Bench,
    Workers,
    daemon,
    fill,
    huge_targets,
    key_of,
    shuffled,
)

import kvd

STORED = 16384  # As many as the roofline reads from.
ARENA_BLOCKS = 8192  # Smaller, and the eviction policy plays every reference, not a sample.
BATCH = 32
THREADS = 4
MANY = 4096
ISOLATED = 1024
ROOFLINE_GETS = 4096
ROOFLINE_PUTS = 6400
LOAD_S = 1.0
HOT = 1024
FILES = ("--long-path", "{dir}/long", "--long-bytes")


def promotions(bench: Bench) -> list[Row]:
    """Blocks of the long tier in batches of 32, until they can be read in memory."""
    found: dict[str, list[float]] = {"many": [], "isolated": [], "roofline": []}
    flags = ("--max-bytes", str(ARENA_BLOCKS * SLOT), *FILES, "2G")
    with daemon(bench, *flags) as socket, kvd.Client(socket) as client:
        fill(client, [key_of(number) for number in range(STORED)], SLOT, flush=True)
        promoter = Promoter(client)
        promoter.run(THREADS, 2 * ARENA_BLOCKS, share=0.0)  # What storing left in memory goes.
        runs = {
            "many": lambda: promoter.run(THREADS, MANY),
            "isolated": lambda: promoter.run(1, ISOLATED),
            "roofline": lambda: roofline.get(bench.directory, BATCH, ROOFLINE_GETS),
        }
        roofline.get(bench.directory, BATCH, BATCH)
        for _ in bench.rounds("promotions"):
            for name, value in shuffled(runs).items():
                found[name].append(value)
    return [
        make(
            "promotions",
            what,
            found[name],
            "blocks/s",
            "ratio",
            must,
            beside=found["roofline"],
            beside_what="roofline get 32",
            combine=ratio,
            at_most=False,
            note=f"{promoter.missed} of {promoter.asked} missed" if promoter.missed else "",
        )
        for name, what, must in (
            ("many", f"long hit 64 KiB, {THREADS} batches of {BATCH} in flight", 0.75),
            ("isolated", f"long hit 64 KiB, one batch of {BATCH}", 0.5),
        )
    ]


class Promoter:
    """Leases blocks that are on the long tier only: always those asked for longest ago."""

    def __init__(self, client: kvd.Client) -> None:
        self.client = client
        self.blocks = client.namespace(SPACE)
        self.lock = threading.Lock()
        self.next = 0
        self.asked = self.missed = 0
        # Neighbours in order of storing would be neighbours on disk.
        self.keys = [key_of(number * 6151 % STORED) for number in range(STORED)]

    def run(self, threads: int, count: int, share: float = 0.9) -> float:
        """Return blocks promoted a second; at least a `share` of all must be."""
        batches = [self._batch() for _ in range(count // BATCH)]
        before = self._promoted()
        started = time.perf_counter()
        workers = [
            threading.Thread(target=self._read, args=(batches[at::threads],))
            for at in range(threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - started
        promoted = self._promoted() - before
        self.asked += count
        if promoted < share * count:
            raise SystemExit(f"only {promoted} of {count} blocks came from the long tier")
        return promoted / seconds

    def _batch(self) -> list[bytes]:
        first = self.next
        self.next = (first + BATCH) % STORED
        return self.keys[first : first + BATCH]

    def _read(self, batches: list[list[bytes]]) -> None:
        for keys in batches:
            with self.blocks.lease(keys) as views:
                self.missed += views.count(None)

    def _promoted(self) -> int:
        return self.client.stats().long.blocks_promoted


class Writer:
    """A client process that stores new blocks as fast as it can."""

    def __init__(self, socket: str) -> None:
        self.client = kvd.Client(socket)
        self.blocks = self.client.namespace("load")
        self.values = huge_targets(64 << 20, SLOT)
        self.number = 0

    def run(self, seconds: float) -> int:
        """Return how many blocks were taken."""
        end = time.perf_counter() + seconds
        stored = 0
        while time.perf_counter() < end:
            first = self.number
            self.number += 64
            stored += sum(
                self.blocks.put_many(
                    [
                        (key_of(first + at), self.values[(first + at) % len(self.values)])
                        for at in range(64)
                    ]
                )
            )
        return stored

    def flush(self) -> None:
        """Wait until the queue is empty."""
        self.client.flush(ANSWER_S)


class HotReader(Reader):
    """A client process whose hits are timed one by one."""

    def times(self, seconds: float) -> tuple[list[float], int]:
        """Return the us of each hit in memory, and how many lookups were none.

        Pauses, as an engine does, so that it takes no core.
        """
        keys, get_many_into = self.keys[:HOT], self.blocks.get_many_into
        for at in range(HOT):
            # What was evicted comes back; what nobody read while more than both tiers hold was
            # stored is nowhere, and stored anew.
            if self.blocks.get_into(keys[at], self.targets[at]) is None:
                self.blocks.put(keys[at], self.targets[at])
        end = time.perf_counter() + seconds
        found: list[float] = []
        others = 0
        tiers: list[str | None] = []
        while time.perf_counter() < end:
            for at in self.random.sample(range(HOT), 32):
                started = time.perf_counter()
                get_many_into([keys[at]], [self.targets[at]], tiers)
                took = (time.perf_counter() - started) * 1e6
                if tiers[0] == "memory":
                    found.append(took)
                else:
                    others += 1
            time.sleep(0.002)
        return found, others


def write_back(bench: Bench) -> list[Row]:
    """Write-back while one process stores without pause, and what another's hits then take."""
    written, puts, loaded, quiet, taken = [], [], [], [], []
    held: list[float] = []
    flags = ("--max-bytes", "768M", *FILES, "2G")
    with daemon(bench, *flags) as socket, kvd.Client(socket) as client:
        fill(client, [key_of(number) for number in range(4096)], SLOT, flush=True)
        with Workers(1, Writer, socket) as writer, Workers(1, HotReader, socket) as reader:
            for _ in range(3):
                # Read all the while, or it would not be a hot set: a fast disk takes more in
                # these seconds than the region and memory hold together.
                writer.start("run", LOAD_S)
                reader.all("times", LOAD_S)
                writer.results()
            writer.all("flush")
            roofline.put(bench.directory, 64, ROOFLINE_PUTS)
            for _ in bench.rounds("write-back"):
                times, others = reader.all("times", LOAD_S / 2)[0]
                if not times:
                    raise SystemExit(f"without load none of {others} lookups was a hit in memory")
                quiet.append(percentile(times, 0.99))
                puts.append(roofline.put(bench.directory, 64, ROOFLINE_PUTS))
                before = client.stats().long.blocks_written
                started = time.perf_counter()
                writer.start("run", LOAD_S)
                reader.start("times", LOAD_S)
                taken.append(writer.results()[0] / LOAD_S)
                times, others = reader.results()[0]
                if times:
                    loaded.append(percentile(times, 0.99))
                else:
                    quiet.pop()  # Nothing to compare with it.
                held.append(len(times) / (len(times) + others))
                after = client.stats().long.blocks_written
                written.append((after - before) / (time.perf_counter() - started))
                writer.all("flush")
    if not loaded:
        raise SystemExit("under load not one hot block was found in memory")
    return [
        make(
            "write-back",
            "written under full SET load, 64 KiB",
            written,
            "blocks/s",
            "ratio",
            0.7,
            beside=puts,
            beside_what="roofline put 64",
            combine=ratio,
            at_most=False,
        ),
        make("write-back", "the load: put_many 64", taken, "blocks/s", "blocks/s"),
        # Without it the row below could be met by hits that are few.
        make(
            "write-back",
            f"{HOT} hot blocks still in memory meanwhile",
            held,
            "of lookups",
            "share",
            0.99,
            at_most=False,
        ),
        make(
            "write-back",
            "p99 of L2 hits meanwhile",
            loaded,
            "us",
            "ratio",
            2.0,
            beside=quiet,
            beside_what="p99 without load",
            combine=ratio,
        ),
    ]
