"""The arena's slabs: which class has which, which hold nothing, and slots taken and given back."""

from __future__ import annotations

from collections.abc import Sequence

from kvd.arena import Arena
from kvd.block import Block
from kvd.size_class import SizeClass, Slab
from kvd.size_classes import SizeClasses


class SlabPool:
    """All slabs of an arena. Event loop only.

    Parameters
    ----------
    arena : Arena
        Cuts slabs into slots.
    sizes : sequence of int
        Size classes there are besides the default one.
    resolution : float
        As of `EvictionQueue`.

    Attributes
    ----------
    classes : SizeClasses
        Which sizes slots have.

    Notes
    -----
    A slab is not populated yet, spare (it holds nothing, and is anybody's), or a class's: then
    something of it is in use, or the class was given it and is about to.
    """

    def __init__(self, arena: Arena, sizes: Sequence[int], resolution: float) -> None:
        self.classes = SizeClasses(arena.geometry, (arena.slot_bytes, *sizes), resolution)
        self._arena = arena
        self._slabs = [
            Slab(number, arena.first_slot(number)) for number in range(arena.geometry.slab_count)
        ]
        # The next to be used last.
        self._spare: list[Slab] = []
        self._unpopulated = set(range(arena.geometry.slab_count))

    def __len__(self) -> int:
        return len(self._slabs)

    def __getitem__(self, number: int) -> Slab:
        return self._slabs[number]

    def slab_of(self, slot: int) -> Slab:
        """Return the slab that a slot lies in."""
        return self._slabs[self._arena.slab_of(slot)]

    def class_of(self, slot: int) -> tuple[Slab, SizeClass]:
        """Return the slab and the class of a slot that is in use."""
        slab = self._slabs[self._arena.slab_of(slot)]
        assert slab.size_class is not None
        return slab, slab.size_class

    def block_at(self, slot: int) -> Block | None:
        """Return the block in a slot, or None; also for numbers that no slot has now."""
        slab = self.slab_of(slot)
        position = slot - slab.first_slot
        return slab.blocks[position] if position < slab.slot_count else None

    def class_for(self, size: int) -> SizeClass | None:
        """Return the class that a value goes into."""
        return next(iter(self.classes.holding(size)), None)

    def slots_in(self, slab: Slab, size_class: SizeClass) -> int:
        """Return how many slots of a class a slab would have; the last slab may be short."""
        return self._arena.geometry.slots_in(slab.number, size_class.slot_bytes)

    # -- counts --------------------------------------------------------------------------------

    @property
    def free_slots(self) -> int:
        """Return how many populated slots hold nothing; a spare slab's as of the default class."""
        free = sum(each.free_slots + each.promised_slots for each in self.classes)
        return free + self._default_slots(self._spare)

    @property
    def populated_slots(self) -> int:
        """Return how many slots there are by now: each holds a block, is free, or is in use."""
        return sum(each.slot_count for each in self.classes) + self._default_slots(self._spare)

    @property
    def slots(self) -> int:
        """Return how many slots there are, with those that have no pages yet."""
        waiting = [self._slabs[number] for number in self._unpopulated]
        return self.populated_slots + self._default_slots(waiting)

    @property
    def used_bytes(self) -> int:
        """Return the bytes of the slots that hold a block."""
        return sum(each.entries * each.slot_bytes for each in self.classes)

    @property
    def free_bytes(self) -> int:
        """Return the bytes of free slots, and of spare slabs."""
        free = sum(
            (each.free_slots + each.promised_slots) * each.slot_bytes for each in self.classes
        )
        return free + sum(self._arena.geometry.bytes_of(slab.number) for slab in self._spare)

    @property
    def spare_slabs(self) -> int:
        """Return how many populated slabs hold nothing and are no class's."""
        return len(self._spare)

    def _default_slots(self, slabs: Sequence[Slab]) -> int:
        geometry, slot_bytes = self._arena.geometry, self._arena.slot_bytes
        return sum(geometry.slots_in(slab.number, slot_bytes) for slab in slabs)

    # -- change --------------------------------------------------------------------------------

    def add(self, first: int, count: int) -> None:
        """Take populated slabs into use; the lowest are used first."""
        self._spare[:0] = reversed(self._slabs[first : first + count])
        self._unpopulated.difference_update(range(first, first + count))

    def room(self, size_class: SizeClass, wanted: int) -> int:
        """Return how many slots a class may give without an eviction, as far as they matter."""
        room = size_class.free_slots
        for slab in self._spare:
            if room >= wanted:
                break
            room += self.slots_in(slab, size_class)
        return room

    def take(self, size_class: SizeClass) -> int:
        """Take a free slot of a class out; `room` says that there is one."""
        if not size_class.free_slots:
            slab = next(each for each in reversed(self._spare) if self.slots_in(each, size_class))
            self._spare.remove(slab)
            self._give(slab, size_class)
        return size_class.take_slot()

    def free(self, slot: int) -> None:
        """Take back a slot that holds nothing.

        A slab that holds nothing is anybody's, or whose it was promised to.
        """
        slab, size_class = self.class_of(slot)
        size_class.give_slot(slab, slot)
        if len(slab.free) < slab.slot_count:
            return
        other = slab.promised_to
        size_class.let_go(slab)
        if other is not None and other in self.classes:
            self._give(slab, other)
        else:
            self._spare.append(slab)

    def let_go(self, slab: Slab) -> None:
        """Make a slab spare in which every slot is free."""
        assert slab.size_class is not None
        slab.size_class.let_go(slab)
        self._spare.append(slab)

    def is_free(self, slot: int) -> bool:
        """Return whether a slot was the last of its slab to become free: nobody has it."""
        slab = self.slab_of(slot)
        if slab.size_class is None or len(slab.free) == slab.slot_count:
            return True
        return bool(slab.free) and slab.free[-1] == slot

    def _give(self, slab: Slab, size_class: SizeClass) -> None:
        size_class.take_in(slab, self._arena.cut(slab.number, size_class.slot_bytes))
