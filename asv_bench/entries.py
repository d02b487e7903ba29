"""`python asv_bench/entries.py`: reopening many entries, RAM an entry, speed of a look.

Values are empty, so that a million entries take seconds to store; opening reads none anyway.
Each opening is a process of its own, with the files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

import tablespace
from tablespace import compaction

KEYS_PER_CALL = 4096
Figures = dict[str, float]


def key_of(number: int) -> bytes:
    """Return a key of 48 bytes."""
    return b"%048d" % number


def fill(path: str, count: int, clean: bool) -> None:
    """Store `count` entries; with `clean` close, else end as a crash would, all in the journal."""
    if not clean:
        vars(compaction)["MIN_JOURNAL_BYTES"] = 1 << 40  # Never compact.
    store = tablespace.open(path, max_bytes=count * 4096, slot_bytes="4K")
    for start in range(0, count, 4096):
        keys = range(start, min(start + 4096, count))
        store.put_many((key_of(number), b"") for number in keys)
    if clean:
        store.close()
    os._exit(0)


def open_once(path: str, count: int) -> None:
    """Open, look, and print what it cost; ends without closing, so that the files stay."""
    import gc

    gc.collect()
    before = resident_bytes()
    started = time.perf_counter()
    store = tablespace.open(path)
    seconds = time.perf_counter() - started
    grown = resident_bytes() - before
    assert len(store) == count
    looks = []
    for start in range(0, 64 * KEYS_PER_CALL, KEYS_PER_CALL):
        keys = [key_of((start + at) * 7919 % count) for at in range(KEYS_PER_CALL)]
        started = time.perf_counter()
        found = store.contains_many(keys)
        looks.append((time.perf_counter() - started) / KEYS_PER_CALL * 1e6)
        assert all(found)
    figures = {
        "open_s": seconds,
        "index_s": store.stats().recovery.seconds,
        "bytes_an_entry": store.stats().index_bytes / count,
        "resident_bytes_an_entry": grown / count,
        "contains_us_a_key": statistics.median(looks),
    }
    sys.stdout.write(json.dumps(figures))
    sys.stdout.flush()
    os._exit(0)


def resident_bytes() -> int:
    """Return this process's resident set."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def child(*arguments: object) -> str:
    """Run this file again with a part's name and arguments; return what it printed."""
    done = subprocess.run(
        [sys.executable, __file__, *map(str, arguments)], check=True, stdout=subprocess.PIPE
    )
    return done.stdout.decode()


def measure(directory: Path, count: int, source: str, rounds: int) -> Figures:
    """Return medians over several openings of a region of `count` entries."""
    path = directory / f"{source}-{count}"
    child("fill", path, count, int(source == "snapshot"))
    found: list[Figures] = []
    for _ in range(rounds):
        # Opening rewrites the journal; each opening starts from the same files.
        copy = directory / "copy"
        shutil.copytree(path, copy, ignore=shutil.ignore_patterns("*.bin"))
        for container in (path / "containers").iterdir():
            with (copy / "containers" / container.name).open("wb") as file:
                file.truncate(container.stat().st_size)
        found.append(json.loads(child("open", copy, count)))
        shutil.rmtree(copy)
    shutil.rmtree(path)
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def main() -> int:
    """Measure and print one table."""
    if sys.argv[1:2] == ["fill"]:
        fill(sys.argv[2], int(sys.argv[3]), sys.argv[4] == "1")
    if sys.argv[1:2] == ["open"]:
        open_once(sys.argv[2], int(sys.argv[3]))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="openings of each (default 5)")
    parser.add_argument("--entries", type=int, nargs="+", default=[250_000, 500_000, 1_000_000])
    parser.add_argument("--dir", help="directory to measure in (default: temporary)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="tablespace-entries-", dir=options.dir))
    parts = [(source, count) for source in ("snapshot", "journal") for count in options.entries]
    console = Console(stderr=True)
    rows = []
    try:
        for source, count in track(
            parts, "opening", console=console, disable=not console.is_terminal
        ):
            figures = measure(directory, count, source, options.rounds)
            rows.append({"source": source, "entries": count, **figures})
    finally:
        shutil.rmtree(directory)
    if options.json:
        sys.stdout.write(json.dumps(rows) + "\n")
        return 0
    table = Table(title="48-byte keys")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(
            *(f"{each:,.3f}" if isinstance(each, float) else str(each) for each in row.values())
        )
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
