"""How the data memfd is cut into slabs, and how slots are numbered in them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from kvd.errors import ConfigError
from kvd.long_limits import MAX_SLOT_BYTES

PAGE_BYTES = 4096
HUGE_PAGE_BYTES = 2 << 20
# Of a slot for which there are numbers, where no smaller one was asked for: each number costs
# 320 bytes of index once it is used, and 20 when not.
SMALLEST_SLOT_BYTES = 16 << 10
# Parts of the arena: a class that has a slab of its own, nearly empty, wastes no more than one.
LARGE_ARENA_SLABS = 64
SMALL_ARENA_SLABS = 8


@dataclass(frozen=True)
class SlabGeometry:
    """Slabs of one size over the data memfd; the last may be shorter.

    Slot numbers: slab `s` has the numbers from `s * slots_per_slab` on, as many as it has slots.
    A slot keeps its number whatever sizes other slabs have.

    Attributes
    ----------
    data_bytes, slab_bytes : int
        Of the memfd, and of a slab: the largest slot there can be.
    smallest_bytes : int
        The smallest slot there can be.
    """

    data_bytes: int
    slab_bytes: int
    smallest_bytes: int

    @classmethod
    def choose(
        cls,
        max_bytes: int,
        slot_bytes: int,
        more_sizes: Sequence[int] = (),
        *,
        unit_bytes: int = 0,
    ) -> SlabGeometry:
        """Choose slabs for an arena.

        Parameters
        ----------
        max_bytes : int
            Rounded down to whole slots of `slot_bytes`, or to whole `unit_bytes` if given.
        slot_bytes : int
            Of the default class: a slab holds a whole number of them.
        more_sizes : sequence of int
            Other slots that a slab must be able to hold.

        Raises
        ------
        ConfigError
            When a size is not whole pages, or the arena holds no slot.
        """
        for size in (slot_bytes, *more_sizes):
            if size < 1 or size % PAGE_BYTES:
                raise ConfigError(f"slots of {size} bytes are not whole pages of {PAGE_BYTES}")
        step = unit_bytes or slot_bytes
        data_bytes = max_bytes // step * step
        if data_bytes < slot_bytes:
            raise ConfigError(f"{max_bytes} bytes hold no slot of {slot_bytes} bytes")
        wanted = max(HUGE_PAGE_BYTES, data_bytes // LARGE_ARENA_SLABS)
        wanted = min(wanted, MAX_SLOT_BYTES, data_bytes // SMALL_ARENA_SLABS)
        whole = math.lcm(slot_bytes, HUGE_PAGE_BYTES)
        step = whole if whole <= wanted else slot_bytes
        largest = max(slot_bytes, *more_sizes, 0)
        slab_bytes = max(wanted // step, -(-largest // step)) * step
        smallest = min(SMALLEST_SLOT_BYTES, slot_bytes, *more_sizes)
        return cls(data_bytes, min(slab_bytes, data_bytes), smallest)

    @property
    def slab_count(self) -> int:
        """Return how many slabs there are."""
        return -(-self.data_bytes // self.slab_bytes)

    @cached_property
    def slots_per_slab(self) -> int:
        """Return how many numbers a slab has; asked for several times a block."""
        return self.slab_bytes // self.smallest_bytes

    @property
    def slot_numbers(self) -> int:
        """Return how many slot numbers there are; most belong to no slot."""
        return self.slab_count * self.slots_per_slab

    def bytes_of(self, slab: int) -> int:
        """Return the size of a slab."""
        return min(self.slab_bytes, self.data_bytes - slab * self.slab_bytes)

    def slots_in(self, slab: int, slot_bytes: int) -> int:
        """Return how many slots of a size a slab holds."""
        return self.bytes_of(slab) // slot_bytes

    def slots_in_all(self, slot_bytes: int) -> int:
        """Return how many slots of a size the arena would hold if all had it."""
        whole, rest = divmod(self.data_bytes, self.slab_bytes)
        return whole * (self.slab_bytes // slot_bytes) + rest // slot_bytes
