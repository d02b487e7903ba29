"""`python asv_bench/peers.py`: the engine beside LMDB, RocksDB, SQLite, files, raw blocks.

Ratios are ours over the peer's, in pairs interleaved in random order.  At the same batch (64
values of 64 KiB) and the same durability; LMCache's writer syncs nothing, so it stands beside
`durability="none"`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import peer_stores
from pairs import Row, compare, show
from regions import COUNT, GROUP, SLOT, Gets, Puts

GROUPS = 20
FILE_GROUPS = 5


def against(
    pairs: int, ours: str, run: Callable[[], float], peers: dict[str, Callable[[], float]]
) -> list[Row]:
    """Return one row a peer: ours over theirs."""
    rows = []
    for name, peer in peers.items():
        rows += compare(pairs, name, peer, {ours: run})
    return rows


def durable_puts(directory: Path, pairs: int) -> list[Row]:
    """Compare durable groups of 64."""
    with Puts(directory / "ours") as ours:
        return against(
            pairs,
            "durable put_many 64",
            lambda: ours.run(ours.plain),
            {
                "LMDB": peer_stores.lmdb_puts(directory / "lmdb", GROUPS),
                "LMDB, full size": peer_stores.lmdb_puts(directory / "lmdb-full", GROUPS, True),
                "RocksDB": peer_stores.rocksdb_puts(directory / "rocksdb", GROUPS),
                "SQLite WAL": peer_stores.sqlite_puts(directory / "sqlite", GROUPS),
                "a file a value": peer_stores.file_puts(directory / "files", FILE_GROUPS),
            },
        )


def raw_blocks(directory: Path, pairs: int) -> list[Row]:
    """Compare with LMCache's raw block device: writes without syncs, reads without checksums."""
    file = directory / "raw"
    with Puts(directory / "ours-unsynced") as ours:
        rows = against(
            pairs,
            "put_many 64, durability none",
            lambda: ours.run(ours.plain, "none"),
            {"raw block writes": peer_stores.raw_block_writes(file, COUNT // GROUP)},
        )
    with Gets(directory / "ours-reads", verify=False) as gets:
        for calls in (32, 512):
            for kind, buffers in (("aligned", gets.aligned), ("unaligned", gets.unaligned)):
                peer = peer_stores.raw_block_reads(file, buffers, calls, COUNT)
                rows += against(
                    pairs,
                    f"get_many_into {calls}, {kind}, unchecked",
                    partial(gets.run, calls, buffers),
                    {f"raw block reads {calls}, {kind}": peer},
                )
    return rows


def eviction(directory: Path, pairs: int) -> list[Row]:
    """Compare a full region, where each put evicts, with one that has room."""
    with Puts(directory / "full") as full, Puts(directory / "roomy", full=False) as roomy:
        return compare(
            pairs,
            "the same with room",
            lambda: roomy.run(roomy.plain),
            {"durable put_many 64, full region": lambda: full.run(full.plain)},
        )


PARTS = {"durable": durable_puts, "raw": raw_blocks, "eviction": eviction}


def main() -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs (default 15)")
    parser.add_argument("--dir", help="directory on the disk to measure (default: temporary)")
    parser.add_argument("--part", choices=[*PARTS], action="append", help="only this part")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    rows: list[Row] = []
    for name in options.part or PARTS:
        directory = Path(tempfile.mkdtemp(prefix="tablespace-peers-", dir=options.dir))
        try:
            rows += PARTS[name](directory, options.pairs)
        finally:
            shutil.rmtree(directory)
    show(f"{SLOT >> 10} KiB values: ours over the peer's", rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
