"""How long the vLLM connector's look-up of a long prompt takes: python asv_bench/vllm_lookup.py

A real daemon, no engine: the call that the scheduler waits for, of a prompt that is all there, of
one that is there by half, of one that is not, and of one that only the disk has.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from vllm_engine import daemon

import kvd
from kvd_connectors.vllm.lookups import Lookups
from kvd_connectors.vllm.plan import Group, Plan

TOKENS = 16


def times(
    blocks: kvd.NamespaceHandle, hashes: list[bytes], found: int, tries: int
) -> dict[str, float]:
    """Return how long look-ups took, in milliseconds."""
    group = Group(0, ("layer",), TOKENS, 1)
    plan = Plan((group,), TOKENS, 0, (), True)
    took, told = [], []
    for _ in range(tries):
        lookups = Lookups(plan, [[(blocks, group)]])
        started = time.perf_counter()
        count = lookups.find("request", hashes, 0, len(hashes))
        took.append(1e3 * (time.perf_counter() - started))
        while count is None:
            time.sleep(1e-3)
            count = lookups.find("request", hashes, 0, len(hashes))
        told.append(1e3 * (time.perf_counter() - started))
        assert count == found
        lookups.close()
    cuts = statistics.quantiles(took, n=100)
    return {
        "best": min(took),
        "p50": cuts[49],
        "p99": cuts[98],
        "until_known_p50": statistics.median(told),
    }


def main() -> None:
    """Measure and print JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--blocks", type=int, default=4000)
    parser.add_argument("--tries", type=int, default=500)
    options = parser.parse_args()
    there = [os.urandom(32) for _ in range(options.blocks)]
    absent = [os.urandom(32) for _ in range(options.blocks)]
    half = options.blocks // 2
    with (
        tempfile.TemporaryDirectory(prefix="kvd-lookup-") as directory,
        daemon(Path(directory)) as store,
        kvd.Client(str(store.socket)) as client,
    ):
        blocks = client.namespace("lookup")
        for first in range(0, len(there), 500):
            assert all(blocks.put_many([(key, b"x") for key in there[first : first + 500]]))
        found = {
            "all": times(blocks, there, len(there), options.tries),
            "half": times(blocks, there[:half] + absent[half:], half, options.tries),
            "none": times(blocks, absent, 0, options.tries),
        }
        assert client.flush(60).pending == 0
        store.kill()
        store.start()
        while blocks.match_prefix(there[:1]) == 0:
            time.sleep(0.1)
        found["disk"] = times(blocks, there, len(there), options.tries)
    print(json.dumps({"blocks": options.blocks, "milliseconds": found}))


if __name__ == "__main__":
    main()
