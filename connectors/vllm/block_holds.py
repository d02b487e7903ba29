"""Blocks that the engine releases while their request runs, held until they are saved."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any


@dataclass
class BlockHolds:
    """Counts references in the engine's own pool of blocks. One thread.

    A block that falls out of a sliding window goes back to the pool while its request runs, and
    another request writes over it: whoever still reads it for a save would store that.

    Attributes
    ----------
    pool : object or None
        The engine's, once it is known.
    """

    pool: Any = None
    # By request: (number of the transfer, its blocks).
    _held: dict[str, list[tuple[int, list[Any]]]] = field(
        default_factory=lambda: defaultdict(list)
    )

    def hold(self, request: str, transfer: int, numbers: list[int]) -> bool:
        """Keep blocks until a transfer is over; say whether that can be done."""
        if self.pool is None:
            return False
        blocks = [self.pool.blocks[number] for number in numbers]
        self.pool.touch(blocks)
        self._held[request].append((transfer, blocks))
        return True

    def release(self, request: str, through: int | None = None) -> None:
        """Let go of a request's blocks up to a transfer, or of all."""
        held = self._held.pop(request, [])
        kept = [] if through is None else [each for each in held if each[0] > through]
        for transfer, blocks in held:
            if through is None or transfer <= through:
                self.pool.free_blocks(reversed(blocks))
        if kept:
            self._held[request] = kept

    def __bool__(self) -> bool:
        return bool(self._held)
