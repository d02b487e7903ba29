"""Flags of the long tier."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kvd.arena_layout import PAGE_BYTES
from kvd.config.flag import choice, flag, size
from kvd.config.values import Values
from tablespace import format_size

TITLE = "long tier"
MAX_SLOT_BYTES = 32 << 20  # Must fit a frame; larger is a typing error, not a block.


def directory(given: str) -> Path:
    """A directory that exists or can be made."""
    if not given:
        raise ValueError("empty; name a directory, or leave it out")
    path = Path(given).absolute()
    if path.exists() and not path.is_dir():
        raise ValueError("is not a directory; name one")
    parent = path
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"{parent} is not writable; choose another directory or change its permissions"
        )
    return path


def slot_size(given: str) -> int:
    """A size a slot may have."""
    number = size(given)
    if number % PAGE_BYTES or not PAGE_BYTES <= number <= MAX_SLOT_BYTES:
        raise ValueError(
            f"must be a multiple of 4K between 4K and {format_size(MAX_SLOT_BYTES)}, "
            "for example 64K"
        )
    return number


@dataclass(frozen=True, kw_only=True)
class Disk:
    """See `kvd --help`."""

    long_path: Path | None = flag(
        "--long-path",
        directory,
        metavar="DIR",
        help="directory of the region (default: no long tier)",
    )
    long_backend: str = flag(
        "--long-backend",
        choice("tablespace"),
        default="tablespace",
        metavar="NAME",
        help="what the long tier is: tablespace, a region on disk",
    )
    long_bytes: int = flag("--long-bytes", size, default="32G", help="hard cap of the region")
    slot_bytes: int = flag(
        "--tablespace-slot-bytes",
        slot_size,
        default="64K",
        help="slot size in memory and on disk; larger values are not stored",
    )
    io_mode: str = flag(
        "--io-mode",
        choice("auto", "direct", "buffered"),
        default="auto",
        metavar="MODE",
        help="auto, direct (O_DIRECT) or buffered (page cache)",
    )


def settle(values: Values) -> list[str]:
    """Check the long tier against the slots and against memory."""
    long_bytes, slot_bytes, max_bytes = (
        values["long_bytes"],
        values["slot_bytes"],
        values["max_bytes"],
    )
    if values["long_path"] is None:
        return []
    if long_bytes < slot_bytes:
        raise values.wrong(
            "long_bytes",
            f"holds no slot of {format_size(slot_bytes)}; give more, or leave --long-path out "
            "to run without a long tier",
        )
    if long_bytes < max_bytes:
        return [
            f"advice: the long tier ({format_size(long_bytes)}) is smaller than memory "
            f"({format_size(max_bytes)}), so it will churn; raise --long-bytes"
        ]
    return []
