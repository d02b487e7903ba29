"""The accounts of a daemon: every slot, in memory and on the disk, is in exactly one state."""

from __future__ import annotations

from collections.abc import Iterator

from kvd.results import LongStats, MemoryStats, SlotCounts, Stats, Status


def slots_do_not_add_up(stats: Stats) -> Iterator[str]:
    """Say what is wrong with the sums that hold at every moment."""
    memory = stats.memory
    states = (
        memory.slots_free,
        memory.entries,
        memory.slots_reserved,
        memory.slots_quarantined,
        memory.slots_held,
    )
    if sum(states) != memory.slots_populated:
        yield (
            f"memory: free+entries+reserved+quarantined+held = {'+'.join(map(str, states))} = "
            f"{sum(states)}, populated are {memory.slots_populated} slots"
        )
    for path in stats.long.paths:
        slots = path.slots
        states = (slots.free, slots.live, slots.limbo, slots.reserved, slots.quarantined)
        if sum(states) != slots.capacity:
            yield (
                f"{path.path}: free+live+limbo+reserved+quarantined = "
                f"{'+'.join(map(str, states))} = {sum(states)}, the capacity is {slots.capacity}"
            )
    if stats.long.used_bytes > stats.long.max_bytes:
        yield f"the region uses {stats.long.used_bytes} of {stats.long.max_bytes} bytes"


def unrest(stats: Stats) -> Iterator[str]:
    """Say what still moves although no client asks for anything."""
    memory, long = stats.memory, stats.long
    moving = {
        "reserved in memory": memory.slots_reserved,
        "quarantined in memory": memory.slots_quarantined,
        "held in memory": memory.slots_held,
        "leased": memory.slots_leased,
        "waiting to be written": long.queue_blocks,
        "being written": long.in_flight_blocks,
        "in limbo on disk": sum(path.slots.limbo for path in long.paths),
        "reserved on disk": sum(path.slots.reserved for path in long.paths),
    }
    return (f"{count} {what}" for what, count in moving.items() if count)


def books_do_not_agree(stats: Stats, status: Status, slot_bytes: int) -> Iterator[str]:
    """Say which books of a daemon at rest do not agree with each other."""
    long = stats.long
    live = sum(path.slots.live for path in long.paths)
    bad = sum(path.slots.quarantined for path in long.paths)
    sums = {
        "used_bytes of STATUS": status.used_bytes,
        "used_bytes of STATS": long.used_bytes,
        "slots not free": sum(_taken(path.slots) for path in long.paths) * slot_bytes,
        "live and quarantined slots": (live + bad) * slot_bytes,
        "namespaces' bytes": sum(status.per_namespace_bytes.values()) + bad * slot_bytes,
    }
    if len(set(sums.values())) > 1:
        yield f"bytes on disk differ: {sums}"
    entries = {
        "live slots": live,
        "entries": long.entries,
        "namespaces' entries": sum(each.entries for each in status.namespaces.values()),
    }
    if len(set(entries.values())) > 1:
        yield f"entries on disk differ: {entries}"
    if status.used_bytes + status.free_bytes != status.max_bytes:
        yield (
            f"used_bytes {status.used_bytes} and free_bytes {status.free_bytes} do not make "
            f"max_bytes {status.max_bytes}"
        )
    bound = long.max_bytes + status.index_bound_bytes
    if status.allocated_bytes > bound:
        yield f"the disk holds {status.allocated_bytes} bytes, bound and index are {bound}"
    if status.tmp_files:
        yield f"{status.tmp_files} temporary files lie about"


def damage(memory: MemoryStats, long: LongStats) -> Iterator[str]:
    """Say what the daemon itself found damaged: no client here scribbles."""
    if memory.corrupt or long.corrupt:
        yield f"damaged blocks: {memory.corrupt} in memory, {long.corrupt} on disk"


def _taken(slots: SlotCounts) -> int:
    return slots.capacity - slots.free
