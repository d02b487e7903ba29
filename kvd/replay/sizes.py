"""How large a replayed block is: all of one size, or each of its own between two."""

from __future__ import annotations

import msgspec

from kvd.replay.content import CELL_BYTES, mix
from tablespace import format_size, parse_size


class BlockSizes(msgspec.Struct, frozen=True):
    """Sizes of blocks: the smallest, doubled up to the largest; a block's follows from its id.

    Parameters
    ----------
    smallest, largest : int
        Bytes. The smallest is a positive multiple of 512, the largest a power of two times it.
    """

    smallest: int
    largest: int

    def __post_init__(self) -> None:
        if self.smallest < CELL_BYTES or self.smallest % CELL_BYTES:
            raise ValueError(
                f"blocks of {self.smallest} bytes: the size must be a multiple of {CELL_BYTES}"
            )
        times, rest = divmod(self.largest, self.smallest)
        if rest or times < 1 or times & (times - 1):
            raise ValueError(
                f"blocks of {format_size(self.smallest)} to {format_size(self.largest)}: sizes "
                "double from the first, so the last must be a power of two times it"
            )

    @property
    def all(self) -> list[int]:
        """Every size, ascending."""
        times = self.largest // self.smallest
        return [self.smallest << shift for shift in range(times.bit_length())]

    @property
    def mean(self) -> int:
        """Bytes of a block on average: each size is as likely as the others."""
        return sum(self.all) // len(self.all)

    def of(self, hash_id: int) -> int:
        """Return the size of the block of an id, in bytes."""
        if self.smallest == self.largest:
            return self.largest
        return self.smallest << (mix(~hash_id & ((1 << 64) - 1)) % len(self.all))

    def __str__(self) -> str:
        first = format_size(self.smallest)
        return first if self.smallest == self.largest else f"{first}-{format_size(self.largest)}"


def as_sizes(block_bytes: int | BlockSizes) -> BlockSizes:
    """Return one size as the sizes of blocks that all have it."""
    if isinstance(block_bytes, BlockSizes):
        return block_bytes
    return BlockSizes(block_bytes, block_bytes)


def parse_sizes(text: str) -> BlockSizes:
    """Return the sizes that ``64K`` or ``64K-4M`` describes.

    Raises
    ------
    ValueError
        The text says what is wrong with it.
    """
    first, dash, last = text.partition("-")
    smallest = parse_size(first)
    return BlockSizes(smallest, parse_size(last) if dash else smallest)
