"""How many blocks go in one call to kvd."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

Item = TypeVar("Item")

# What goes in one call: enough to keep a disk busy, little enough to be over soon.
BATCH_BYTES = 16 << 20
MAX_BATCH_BLOCKS = 256


def batches(items: list[Item], block_bytes: int) -> Iterator[list[Item]]:
    """Cut blocks, or what stands for them, into what goes in one call each."""
    step = max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // block_bytes))
    return (items[first : first + step] for first in range(0, len(items), step))
