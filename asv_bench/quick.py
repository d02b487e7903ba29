"""`make bench`: the engine beside the roofline, interleaved, as medians of per-pair ratios.

Answers in a few minutes whether the engine still runs at the disk's speed.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import roofline
from pairs import compare, show
from regions import COUNT, GROUP, Gets, Puts


def main() -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs (default 15)")
    parser.add_argument("--dir", help="directory on the disk to measure (default: temporary)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="tablespace-bench-", dir=options.dir))
    try:
        with Puts(directory / "put") as put, Gets(directory / "get") as get:
            rows = compare(
                options.pairs,
                "roofline put 64",
                lambda: roofline.put(directory, GROUP, COUNT),
                {
                    "durable put_many, groups of 64, bytes": lambda: put.run(put.plain),
                    "durable put_many, groups of 64, aligned": lambda: put.run(put.aligned),
                },
            )
            rows += compare(
                options.pairs,
                "roofline put 16",
                lambda: roofline.put(directory, 16, COUNT // 2),
                {"durable put, 16 threads": lambda: put.run_threads(16)},
            )
            rows += compare(
                options.pairs,
                "roofline get 32",
                lambda: roofline.get(directory, 32, COUNT),
                {
                    "random get_many_into, calls of 512": lambda: get.run(512),
                    "random get_many_into, calls of 32": lambda: get.run(32),
                },
            )
    finally:
        shutil.rmtree(directory)
    show("64 KiB values against the roofline of this disk", rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
