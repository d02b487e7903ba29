"""Show on a machine with a GPU what only a GPU can show of chunk files.

    python tools/gpu_direct_trial.py ROOT [--device cuda:0] [--ais auto|1|0] [--chunk-bytes 128M]

Stores and reads chunks of random bytes between the device's memory and ROOT, with the driver that
an engine would get there and by pread and pwrite, compares every byte, and prints JSON: which
driver, bytes a second each way (median of the chunks), what the checksum costs on the device, and
what the kernel's nvidia-fs counted meanwhile. Exit status 1 where bytes differ, 2 where nothing
could be tried. `--device host` does the same with host memory, without torch.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from kvd_connectors.gpu_direct.choosing import Choice, choose_driver
from kvd_connectors.gpu_direct.directory import RootDirectory
from kvd_connectors.gpu_direct.errors import GpuDirectError, GpuIoError
from kvd_connectors.gpu_direct.memory import HostMemory, Memory
from kvd_connectors.gpu_direct.posix_driver import PosixDriver
from kvd_connectors.gpu_direct.settings import read_settings
from kvd_connectors.gpu_direct.store import ChunkStore

NVIDIA_STATS = Path("/proc/driver/nvidia-fs/stats")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", type=Path, help="a directory on the disk in question")
    parser.add_argument("--device", default="cuda:0", help="of torch, or host")
    parser.add_argument("--ais", default="auto", choices=("auto", "1", "0"), help="as KVD_AIS")
    parser.add_argument("--chunk-bytes", default="128M", help="of each chunk")
    parser.add_argument("--chunks", type=int, default=8, help="stored and read with each driver")
    return parser.parse_args()


def memory_of(device: str) -> Callable[[int], Memory]:
    """Return what makes memory on a device."""
    if device == "host":
        return HostMemory
    import torch

    from kvd_connectors.gpu_direct.tensor_memory import TensorMemory

    return lambda size: TensorMemory(size, torch.device(device))


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    found = call()
    return time.perf_counter() - started, found


def try_driver(
    root: Path, choice: Choice, make: Callable[[int], Memory], size: int, count: int
) -> dict[str, Any]:
    """Store and read chunks; return rates and whether all bytes came back."""
    store = ChunkStore(
        RootDirectory(root), choice, "trial", budget_bytes=(count + 1) * (size + (1 << 20))
    )
    memory = make(size)
    store.register(memory)
    random = np.random.default_rng(1)
    wanted = [random.integers(0, 256, size, dtype=np.uint8) for _ in range(min(count, 2))]
    found = np.empty(size, dtype=np.uint8)
    stored: list[float] = []
    read: list[float] = []
    wrong = 0
    for number in range(count):
        memory.copy_in(0, wanted[number % len(wanted)])
        keys = [number.to_bytes(32, "big")]
        seconds, done = timed(lambda keys=keys: store.put(keys, memory, size))
        stored.append(seconds)
        wrong += not done
    checksum_s, _ = timed(lambda: memory.checksum(memory.size_bytes))
    for number in range(count):
        memory.zero(0, size)
        keys = [number.to_bytes(32, "big")]
        seconds, length = timed(lambda keys=keys: store.get(keys, memory))
        read.append(seconds)
        memory.copy_out(0, found)
        wrong += length != size or not np.array_equal(found, wanted[number % len(wanted)])
    status = store.status()
    store.unregister(memory)
    store.close()
    return {
        "driver": status["driver"],
        "not_chosen": status["not_chosen"],
        "store_bytes_per_s": round(size / statistics.median(stored)),
        "read_bytes_per_s": round(size / statistics.median(read)),
        "checksum_bytes_per_s": round(size / checksum_s),
        "wrong_chunks": wrong,
    }


def main() -> int:
    """Try the driver of choice and plain calls."""
    given = parse()
    size = read_settings({"KVD_L3_BUDGET_BYTES": given.chunk_bytes}).budget_bytes or 0
    make = memory_of(given.device)
    folder = Path(tempfile.mkdtemp(prefix="trial-", dir=given.root))
    before = NVIDIA_STATS.read_text() if NVIDIA_STATS.exists() else None
    try:
        choice = choose_driver(given.ais, RootDirectory(folder / "chosen"), make)
        results = [try_driver(folder / "chosen", choice, make, size, given.chunks)]
        after = NVIDIA_STATS.read_text() if NVIDIA_STATS.exists() else None
        posix = Choice(PosixDriver(direct=True), ())
        results.append(try_driver(folder / "posix", posix, make, size, given.chunks))
    except (GpuDirectError, GpuIoError, OSError) as error:
        print(f"gpu_direct_trial: {error}", file=sys.stderr)
        return 2
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    answer = {
        "device": given.device,
        "chunk_bytes": size,
        "results": results,
        "nvidia_fs_before": before,
        "nvidia_fs_after": after,
    }
    print(json.dumps(answer, indent=2))
    return 1 if any(each["wrong_chunks"] for each in results) else 0


if __name__ == "__main__":
    sys.exit(main())
