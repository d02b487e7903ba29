"""The arena's size classes: which there are, and which one a value goes into."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

from kvd.size_class import SizeClass
from kvd.slab_geometry import PAGE_BYTES, SlabGeometry

MAX_CLASSES = 8  # Each may hold a slab that is nearly empty.


class SizeClasses:
    """At most `MAX_CLASSES` classes, by size. Event loop only.

    Parameters
    ----------
    geometry : SlabGeometry
        Of the arena: bounds the sizes.
    sizes : sequence of int
        The classes that stay, the default one first; those there is no place for are left out.
    resolution : float
        As of `EvictionQueue`.
    """

    def __init__(self, geometry: SlabGeometry, sizes: Sequence[int], resolution: float) -> None:
        self._geometry = geometry
        self._resolution = resolution
        chosen = [size for size in dict.fromkeys(sizes) if size <= geometry.slab_bytes]
        self.left_out = chosen[MAX_CLASSES:]
        self._sizes = sorted(chosen[:MAX_CLASSES])
        self._by_size = {size: SizeClass(size, resolution, permanent=True) for size in self._sizes}

    def __len__(self) -> int:
        return len(self._sizes)

    def __iter__(self) -> Iterator[SizeClass]:
        """Go through all, the smallest first."""
        return iter([self._by_size[size] for size in self._sizes])

    def __getitem__(self, size: int) -> SizeClass:
        return self._by_size[size]

    @property
    def sizes(self) -> list[int]:
        """Return the slot sizes, the smallest first."""
        return list(self._sizes)

    @property
    def largest_bytes(self) -> int:
        """Return the size of the largest slot: of the largest value."""
        return self._sizes[-1]

    def holding(self, size: int) -> list[SizeClass]:
        """Return the classes whose slots hold a value of so many bytes, the smallest first."""
        first = bisect.bisect_left(self._sizes, size)
        return [self._by_size[each] for each in self._sizes[first:]]

    def size_for(self, size: int) -> int | None:
        """Return the slot size for blocks of so many bytes, whether there is such a class or not.

        None for a size that no slab holds.
        """
        size = max(self._geometry.smallest_bytes, -(-size // PAGE_BYTES) * PAGE_BYTES)
        return size if size <= self._geometry.slab_bytes else None

    def add(self, size: int) -> SizeClass | None:
        """Make a class for blocks of so many bytes, if need be and possible.

        An announced class without a slab makes way where there are too many. Else the next
        larger one serves.

        Returns
        -------
        SizeClass or None
            The one that serves; None when all are smaller.
        """
        wanted = self.size_for(size)
        if wanted is None:
            return None
        if wanted not in self._by_size:
            if len(self._sizes) >= MAX_CLASSES:
                self._drop_one()
            if len(self._sizes) < MAX_CLASSES:
                self._by_size[wanted] = SizeClass(wanted, self._resolution, permanent=False)
                bisect.insort(self._sizes, wanted)
        return next(iter(self.holding(wanted)), None)

    def _drop_one(self) -> None:
        for size, each in self._by_size.items():
            if not each.permanent and not each.slabs:
                del self._by_size[size]
                self._sizes.remove(size)
                return
