"""Blocks of a request that are to be loaded or saved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from kvd_connectors.vllm.options import Keep

# (number of the block in the engine's cache, its key)
Pair = tuple[int, bytes]

# What goes in one call: enough to keep a disk busy, little enough to be over soon.
BATCH_BYTES = 16 << 20
MAX_BATCH_BLOCKS = 256


def batches(pairs: list[Pair], block_bytes: int) -> Iterator[list[Pair]]:
    """Cut blocks into what goes in one call each."""
    step = max(1, min(MAX_BATCH_BLOCKS, BATCH_BYTES // block_bytes))
    return (pairs[first : first + step] for first in range(0, len(pairs), step))


@dataclass(frozen=True)
class Transfer:
    """Blocks of one request to load or to save.

    Attributes
    ----------
    request : str
    pairs : list of list of (int, bytes)
        For each group of the plan.
    keep : Keep
        Of what is saved.
    """

    request: str
    pairs: list[list[Pair]]
    keep: Keep
