"""`make bench`: the engine beside the roofline, interleaved, as medians of per-pair ratios.

Other sizes and peers belong to the airspeed velocity suites; this answers in about a minute
whether the engine still runs at the disk's speed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import roofline
from rich.console import Console
from rich.progress import track
from rich.table import Table

import tablespace

SLOT = 65536
GROUP = 64
COUNT = 6400
READ_SLOTS = 16384


class PutBench:
    """Durable `put_many` in groups of 64 into a region written before (steady state)."""

    def __init__(self, directory: Path) -> None:
        size = COUNT * SLOT
        self.store = tablespace.open(
            directory, max_bytes=4 * size, container_bytes=size, on_full="evict"
        )
        self.memory = tablespace.AlignedBuffer(GROUP * SLOT)
        view = memoryview(self.memory)
        view[:] = os.urandom(len(view))
        self.aligned = [view[at : at + SLOT] for at in range(0, len(view), SLOT)]
        self.plain = [bytes(piece) for piece in self.aligned]
        self.round = 0
        for _ in range(5):
            self.run(self.plain)

    def run(self, values: list[bytes] | list[memoryview]) -> float:
        """Return puts a second."""
        self.round += 1
        started = time.perf_counter()
        for group in range(COUNT // GROUP):
            self.store.put_many(
                (b"%08d-%08d-%04d" % (self.round, group, at), values[at]) for at in range(GROUP)
            )
        return COUNT / (time.perf_counter() - started)


class GetBench:
    """Random verified `get_many_into` of a 1 GiB region, aligned buffers on huge pages."""

    def __init__(self, directory: Path) -> None:
        self.store = tablespace.open(directory, max_bytes="4G", container_bytes="1G")
        values = [os.urandom(SLOT) for _ in range(GROUP)]
        for start in range(0, READ_SLOTS, GROUP):
            self.store.put_many((b"%016d" % (start + at), values[at]) for at in range(GROUP))
        self.memory = tablespace.AlignedBuffer(512 * SLOT)
        view = memoryview(self.memory)
        self.buffers = [view[at : at + SLOT] for at in range(0, len(view), SLOT)]

    def run(self, keys_per_call: int) -> float:
        """Return gets a second."""
        keys = [b"%016d" % random.randrange(READ_SLOTS) for _ in range(COUNT)]
        started = time.perf_counter()
        for start in range(0, COUNT, keys_per_call):
            part = keys[start : start + keys_per_call]
            found = self.store.get_many_into(part, self.buffers[: len(part)])
            assert None not in found
        return COUNT / (time.perf_counter() - started)


def compare(
    pairs: int, ceiling: Callable[[], float], variants: dict[str, Callable[[], float]]
) -> list[dict[str, float | str]]:
    """Run ceiling and variants in random order within each round; return ratios' quartiles."""
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    ceilings = []
    console = Console(stderr=True)
    for _ in track(range(pairs), "measuring", console=console, disable=not console.is_terminal):
        runs: list[tuple[str, Callable[[], float]]] = [("", ceiling), *variants.items()]
        random.shuffle(runs)
        found = {name: run() for name, run in runs}
        ceilings.append(found[""])
        for name in variants:
            speeds[name].append(found[name])
            ratios[name].append(found[name] / found[""])
    rows: list[dict[str, float | str]] = []
    for name, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        rows.append(
            {
                "what": name,
                "per_s": statistics.median(speeds[name]),
                "roofline_per_s": statistics.median(ceilings),
                "ratio_q1": low,
                "ratio": middle,
                "ratio_q3": high,
            }
        )
    return rows


def main() -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs (default 15)")
    parser.add_argument("--dir", help="directory on the disk to measure (default: temporary)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="tablespace-bench-", dir=options.dir))
    try:
        put, get = PutBench(directory / "put"), GetBench(directory / "get")
        with put.store, get.store:
            rows = compare(
                options.pairs,
                lambda: roofline.put(directory, GROUP, COUNT),
                {
                    "durable put_many, groups of 64, bytes": lambda: put.run(put.plain),
                    "durable put_many, groups of 64, aligned": lambda: put.run(put.aligned),
                },
            )
            rows += compare(
                options.pairs,
                lambda: roofline.get(directory, 32, COUNT),
                {
                    "random get_many_into, calls of 512": lambda: get.run(512),
                    "random get_many_into, calls of 32": lambda: get.run(32),
                },
            )
    finally:
        shutil.rmtree(directory)
    if options.json:
        json.dump(rows, sys.stdout)
        sys.stdout.write("\n")
        return 0
    table = Table(title="64 KiB values against the roofline of this disk")
    for heading in ("what", "per second", "roofline", "ratio", "quartiles"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for row in rows:
        table.add_row(
            str(row["what"]),
            f"{row['per_s']:,.0f}",
            f"{row['roofline_per_s']:,.0f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_q1']:.2f} - {row['ratio_q3']:.2f}",
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
