"""Build and call the roofline: what this machine's disk and memory allow."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from pathlib import Path

from tablespace._core.symbols import locate_extension

COPY_SPAN = 512 << 20
SOURCE = Path(__file__).with_name("roofline.c")
BINARY = Path(__file__).resolve().parent.parent / "build" / "roofline.so"


@functools.cache
def _library() -> ctypes.CDLL:
    """Compile the roofline where it is missing or older than its source, and load it."""
    if not BINARY.exists() or BINARY.stat().st_mtime < SOURCE.stat().st_mtime:
        BINARY.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BINARY.parent) as directory:
            target = Path(directory, BINARY.name)
            subprocess.run(
                [
                    "cc",
                    "-O2",
                    "-Wall",
                    "-Wextra",
                    "-shared",
                    "-fPIC",
                    "-o",
                    target,
                    SOURCE,
                    "-ldl",
                ],
                check=True,
            )
            target.rename(BINARY)
    library = ctypes.CDLL(os.fspath(BINARY))
    for name in ("roofline_put", "roofline_get", "roofline_copy"):
        getattr(library, name).restype = ctypes.c_double
    return library


def _liburing() -> bytes:
    return os.fsencode(locate_extension("liburing.liburing") or "liburing-ffi.so.2")


def put(directory: Path, group: int, count: int) -> float:
    """Return durable 64 KiB writes a second, `group` to a sync."""
    arguments = (_liburing(), os.fsencode(directory), group, ctypes.c_long(count))
    return float(_library().roofline_put(*arguments))


def get(directory: Path, depth: int, count: int) -> float:
    """Return random 64 KiB reads a second, `depth` in flight."""
    arguments = (_liburing(), os.fsencode(directory), depth, ctypes.c_long(count))
    return float(_library().roofline_get(*arguments))


def copy(size_bytes: int, span_bytes: int = COPY_SPAN) -> float:
    """Return 64 KiB copies a second, from and into `span_bytes` each (kept for the next call)."""
    return float(
        _library().roofline_copy(ctypes.c_size_t(size_bytes), ctypes.c_size_t(span_bytes))
    )
