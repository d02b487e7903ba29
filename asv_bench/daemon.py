"""`python asv_bench/daemon.py`: kvd's speed table against a real daemon, in one run.

Each figure stands beside what the machine allows, or beside a peer, in interleaved rounds:
only the ratio or the difference within a round means anything. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from daemon_hits import exists, hits, leases
from daemon_long import promotions, write_back
from daemon_requests import requests
from daemon_rows import Row, show
from daemon_sets import hooks, sets
from daemon_setup import Bench
from rich.console import Console
from rich.progress import Progress

PARTS: dict[str, Callable[[Bench], list[Row]]] = {
    "hits": hits,
    "leases": leases,
    "exists": exists,
    "requests": requests,
    "sets": sets,
    "promotions": promotions,
    "write-back": write_back,
    "hooks": hooks,
}


def main() -> int:
    """Measure and print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=15, help="interleaved pairs (default 15)")
    parser.add_argument("--dir", help="directory on the disk to measure (default: temporary)")
    parser.add_argument("--only", choices=[*PARTS], action="append", help="only this part")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="kvd-bench-", dir=options.dir))
    rows: list[Row] = []
    console = Console(stderr=True)
    try:
        with Progress(console=console, disable=not console.is_terminal) as progress:
            bench = Bench(directory, options.pairs, progress)
            for name in options.only or PARTS:
                rows += PARTS[name](bench)
    finally:
        shutil.rmtree(directory)
    show(rows, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
