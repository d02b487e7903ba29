"""Storing: reserve, fill in place, commit; and what the hooks of an engine spend on it."""

from __future__ import annotations

import mmap
import os
import time

from daemon_rows import Row, make, ratio
from daemon_setup import SLOT, SPACE, Bench, daemon, huge_targets, knows_flag, shuffled

import kvd

MIB = 1 << 20
BATCH = 16
BATCHES = 32
ARENA = 512 << 20
REQUEST_BLOCKS = 32
REQUESTS = 64


def sets(bench: Bench) -> list[Row]:
    """Reserve/commit of 1 MiB in batches of 16, beside plain copies of the same bytes."""
    ours, plain = [], []
    memfd = os.memfd_create("bench")
    os.ftruncate(memfd, ARENA)
    shared = mmap.mmap(memfd, ARENA)
    whole = memoryview(shared)
    whole[:] = bytes(ARENA)
    sources = huge_targets(64 * MIB, MIB)
    flags = ("--tablespace-slot-bytes", "1M", "--max-bytes", str(ARENA))
    with daemon(bench, *flags) as socket, kvd.Client(socket) as client:
        setter = Setter(client, sources)
        for _ in range(ARENA // MIB // BATCH // BATCHES + 1):
            setter.run()  # Until the arena is full and its pages have been touched.
        for _ in bench.rounds("reserve/commit"):
            found = shuffled({"ours": setter.run, "plain": lambda: _copies(whole, sources)})
            ours.append(found["ours"])
            plain.append(found["plain"])
    return [
        make(
            "sets",
            "reserve/commit 1 MiB, batches of 16",
            ours,
            "MiB/s",
            "ratio",
            0.5,
            beside=plain,
            beside_what="memcpy",
            combine=ratio,
            at_most=False,
        )
    ]


class Setter:
    """Stores batches under keys that are always new."""

    def __init__(self, client: kvd.Client, sources: list[memoryview]) -> None:
        self.blocks = client.namespace(SPACE)
        self.sources = sources
        self.number = 0

    def run(self) -> float:
        """Return MiB a second."""
        started = time.perf_counter()
        for _ in range(BATCHES):
            first = self.number
            self.number += BATCH
            with self.blocks.reserve([MIB] * BATCH) as slots:
                for at, slot in enumerate(slots):
                    assert slot.view is not None
                    slot.view[:] = self.sources[(first + at) % len(self.sources)]
                done = slots.commit([b"%032d" % (first + at) for at in range(BATCH)])
            if not all(done):
                raise SystemExit(f"a block was not stored: {done}")
        return BATCHES * BATCH / (time.perf_counter() - started)


def _copies(whole: memoryview, sources: list[memoryview]) -> float:
    started = time.perf_counter()
    for at in range(BATCHES * BATCH):
        place = at * MIB % len(whole)
        whole[place : place + MIB] = sources[at % len(sources)]
    return BATCHES * BATCH / (time.perf_counter() - started)


def hooks(bench: Bench) -> list[Row]:
    """A trace without reuse: what `exists` and `put_many` take of an engine, for each block."""
    rows = []
    admits = ("all", "second-hit") if knows_flag("--admission") else ("",)
    for admission in admits:
        flags = ["--max-bytes", "256M", "--long-path", "{dir}/long", "--long-bytes", "2G"]
        if admission:
            flags += ["--admission", admission]
        times: dict[str, list[float]] = {"exists": [], "put_many": []}
        values = huge_targets(64 * MIB, SLOT)
        with daemon(bench, *flags) as socket, kvd.Client(socket) as client:
            blocks = client.namespace(SPACE)
            number = 0
            for _ in bench.rounds(f"hooks, admission {admission or 'all'}"):
                spent = dict.fromkeys(times, 0.0)
                for _ in range(REQUESTS):
                    keys = [b"%032d" % (number + at) for at in range(REQUEST_BLOCKS)]
                    items = [
                        (key, values[(number + at) % len(values)]) for at, key in enumerate(keys)
                    ]
                    number += REQUEST_BLOCKS
                    before = time.perf_counter()
                    blocks.exists(keys)
                    between = time.perf_counter()
                    blocks.put_many(items)
                    spent["exists"] += between - before
                    spent["put_many"] += time.perf_counter() - between
                for name, seconds in spent.items():
                    times[name].append(seconds / REQUESTS / REQUEST_BLOCKS * 1e6)
        note = "" if admission else "no --admission here"
        rows += [
            make(
                "hooks",
                f"{name} of {REQUEST_BLOCKS} new 64 KiB blocks, admission {admission or 'all'}",
                times[name],
                "us",
                "us a block",
                note=note,
            )
            for name in times
        ]
    return rows
