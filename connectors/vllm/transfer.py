"""Blocks of a request that are to be loaded or saved."""

from __future__ import annotations

from dataclasses import dataclass

from kvd_connectors.batching import batches as batches
from kvd_connectors.vllm.options import Keep

# (number of the block in the engine's cache, its key)
Pair = tuple[int, bytes]


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
