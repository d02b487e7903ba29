"""A process that stores chunks in a root: `python writer.py ROOT BUDGET FIRST COUNT`.

Prints a line for each chunk: its number and whether it is there; then its status as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from kvd_connectors.gpu_direct.choosing import Choice
from kvd_connectors.gpu_direct.directory import RootDirectory
from kvd_connectors.gpu_direct.memory import HostMemory
from kvd_connectors.gpu_direct.posix_driver import PosixDriver
from kvd_connectors.gpu_direct.store import ChunkStore

PAYLOAD = 64 << 10


def main() -> None:
    root, budget, first, count = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    choice = Choice(PosixDriver(direct=True), ())
    store = ChunkStore(RootDirectory(root), choice, "ns", budget_bytes=budget)
    memory = HostMemory(PAYLOAD)
    print("ready", flush=True)
    for number in range(first, first + count):
        bytes_of = np.random.default_rng(number).integers(0, 256, PAYLOAD, dtype=np.uint8)
        memory.copy_in(0, bytes_of)
        keys = [b"%031d%c" % (number, 65 + each) for each in range(4)]
        print(number, store.put(keys, memory, PAYLOAD), flush=True)
    print(json.dumps(store.status()), flush=True)


if __name__ == "__main__":
    main()
