"""What tests of chunk files have in common: keys, bytes, files, and the stand-in's controls."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import numpy as np

from kvd_connectors.gpu_direct.directory import RootDirectory
from kvd_connectors.gpu_direct.memory import HostMemory

PREFIXES = {"cufile": "cuFile", "hipfile": "hipFile"}
VARIABLES = {"cufile": "KVD_CUFILE_LIBRARY", "hipfile": "KVD_HIPFILE_LIBRARY"}
PAYLOAD = 64 << 10
FILE = PAYLOAD + 4096
"""With its header."""

# Ways of failing: of standin.c.
BY_ERRNO, SHORT, NOTHING, ELSEWHERE, LIE, MINUS_ERRNO = range(1, 7)


class Standin:
    """The library in place of the real one, and its controls."""

    def __init__(self, kind: str, path: Path) -> None:
        self.kind = kind
        self.path = path
        self.prefix = PREFIXES[kind]
        self.variable = VARIABLES[kind]
        self.calls = ctypes.CDLL(str(path))
        self.calls.standin_read.restype = ctypes.c_longlong
        self.calls.standin_written.restype = ctypes.c_longlong

    def fail(self, call: str, way: int, value: int = 0, nth: int = 1, times: int = 1) -> None:
        self.calls.standin_fail(call.encode(), nth, way, value or way, times)

    def reset(self) -> None:
        self.calls.standin_fail(b"", 0, 0, 0, 0)
        self.calls.standin_open_before(0)


def keys_of(number: int, count: int = 4) -> list[bytes]:
    return [b"%031d%c" % (number, 65 + each) for each in range(count)]


def fill(memory: HostMemory, number: int, size: int | None = None) -> bytes:
    """Fill memory with bytes of their own for each number; return them."""
    size = memory.size_bytes if size is None else size
    found = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
    memory.array[:size] = found
    return found.tobytes()


def chunk_files(directory: RootDirectory) -> list[Path]:
    return sorted(directory.path.rglob("*.kvcache"))


def bytes_on_disk(directory: RootDirectory) -> int:
    """All that the chunks' directory holds, as du would count it, by length."""
    return sum(path.stat().st_size for path in directory.chunks.rglob("*") if path.is_file())


def path_of(directory: RootDirectory, number: int = 0) -> Path:
    return chunk_files(directory)[number]


def set_age(path: Path, age_s: float) -> None:
    """Make a file one that was last used so long ago."""
    now = path.stat().st_mtime
    os.utime(path, (now - age_s, now - age_s))
