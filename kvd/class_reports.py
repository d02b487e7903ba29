"""The size classes of the memory tier, as STATS and STATUS tell of them."""

from __future__ import annotations

from kvd.memory_tier import MemoryTier
from kvd.results import ClassUse


def class_use(memory: MemoryTier) -> list[ClassUse]:
    """Return what each class has, the smallest slots first."""
    return [
        ClassUse(
            slot_bytes=each.slot_bytes,
            slabs=len(each.slabs),
            slots=each.slot_count,
            slots_free=each.free_slots + each.promised_slots,
            entries=each.entries,
            used_bytes=each.entries * each.slot_bytes,
            value_bytes=each.value_bytes,
            evictions=each.evictions,
        )
        for each in memory.classes
    ]
