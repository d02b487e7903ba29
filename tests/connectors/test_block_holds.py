"""Blocks are counted in the engine's pool as long as they are read, and no longer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvd_connectors.vllm.block_holds import BlockHolds


class Pool:
    """As vLLM's pool of blocks: counts references."""

    def __init__(self) -> None:
        self.blocks = [f"block {number}" for number in range(10)]
        self.references: Counter[Any] = Counter()

    def touch(self, blocks: Iterable[Any]) -> None:
        self.references.update(blocks)

    def free_blocks(self, blocks: Iterable[Any]) -> None:
        self.references.subtract(blocks)
        self.references = +self.references


def test_blocks_are_held_until_their_transfer_is_over() -> None:
    holds, pool = BlockHolds(), Pool()
    holds.pool = pool
    assert holds.hold("r", 1, [1, 2]) and holds.hold("r", 2, [2, 3]) and holds.hold("s", 1, [2])
    assert pool.references == {"block 1": 1, "block 2": 3, "block 3": 1}
    holds.release("r", 0)
    assert sum(pool.references.values()) == 5
    holds.release("r", 1)
    assert pool.references == {"block 2": 2, "block 3": 1}
    holds.release("r", 1)
    holds.release("r")
    assert pool.references == {"block 2": 1} and holds
    holds.release("s")
    holds.release("unknown")
    assert not pool.references and not holds


def test_without_a_pool_nothing_is_held() -> None:
    assert not BlockHolds().hold("r", 1, [1])
