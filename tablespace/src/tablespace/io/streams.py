"""Files that a command line names, and the standard streams beside them."""

from __future__ import annotations

import os
import sys


def read_up_to(name: str, limit_bytes: int) -> bytes:
    """Read a file, or standard input where `name` is "-": at most `limit_bytes` and one more.

    Raises
    ------
    OSError
        The file cannot be read.
    """
    if name == "-":
        return sys.stdin.buffer.read(limit_bytes + 1)
    with open(name, "rb") as file:
        return file.read(limit_bytes + 1)


def write_file(name: str, data: bytes) -> None:
    """Write a file, replacing what it held.

    Raises
    ------
    OSError
    """
    with open(name, "wb") as file:
        file.write(data)


def abandon_stdout() -> None:
    """Let what standard output still buffers go nowhere: its reader has gone, or it is full.

    Otherwise the interpreter flushes it once more as it ends, and complains.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.dup2(nowhere, sys.stdout.fileno())
    except (OSError, ValueError):
        pass
    finally:
        os.close(nowhere)
