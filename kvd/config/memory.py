"""Flags of the memory tier, and how much of it there may be."""

from __future__ import annotations

from dataclasses import dataclass

from kvd.config.flag import flag, size, switch
from kvd.config.values import Values
from kvd.errors import ConfigError
from kvd.machine_memory import free_bytes, reserved_huge_bytes
from kvd.pages import MAX_NODES
from tablespace import format_size

TITLE = "memory tier"
DEFAULT_MAX_BYTES = 8 << 30


def nodes(given: str) -> tuple[int, ...]:
    """NUMA nodes; none of them is all in turn."""
    if given == "interleave":
        return ()
    try:
        numbers = tuple(sorted({int(part) for part in given.split(",")}))
    except ValueError:
        numbers = (-1,)
    if numbers[0] < 0 or numbers[-1] >= MAX_NODES:
        raise ValueError("no nodes; write interleave, or numbers such as 0,1")
    return numbers


@dataclass(frozen=True, kw_only=True)
class Memory:
    """See `kvd --help`."""

    max_bytes: int = flag(
        "--max-bytes",
        size,
        help="size of the shared arena (default: 8G, or half of what is free if less)",
    )
    no_pin: bool = switch("--no-pin", help="let the system swap the arena out")
    hugepages: bool = switch(
        "--hugepages",
        help="huge pages for the arena: reserved ones (vm.nr_hugepages), else made of ordinary "
        "ones, which takes seconds for each GiB",
    )
    numa: tuple[int, ...] | None = flag(
        "--numa",
        nodes,
        metavar="NODES",
        help="where the arena's memory comes from: 'interleave' over all nodes, or numbers "
        "such as 0,1 (default: the system's policy)",
    )


def settle(values: Values) -> list[str]:
    """Bound the arena by what the machine and every cgroup have free."""
    slot_bytes = values["slots"].largest
    free, bound = free_bytes()
    if values["hugepages"] and (reserved := reserved_huge_bytes()) > free:
        free, bound = reserved, "the reserve of huge pages"
    asked = values["max_bytes"]
    if asked is not None:
        if asked < slot_bytes:
            raise values.wrong(
                "max_bytes",
                f"holds no slot of {format_size(slot_bytes)}; give more or lower "
                "--tablespace-slot-bytes",
            )
        if asked > free:
            raise values.wrong(
                "max_bytes",
                f"asks for {asked} bytes, {bound} has {free} bytes free; ask for at most "
                f"{free >> 20}M or free memory",
            )
        values["max_bytes"] = asked // slot_bytes * slot_bytes
        return []
    chosen = min(DEFAULT_MAX_BYTES, free // 2) // slot_bytes * slot_bytes
    if chosen < slot_bytes:
        raise ConfigError(
            f"{bound} has {free} bytes free, too few for one slot of {slot_bytes}; free memory"
        )
    why = (
        "the default"
        if chosen == DEFAULT_MAX_BYTES
        else f"half of the {free >> 20}M that {bound} has free"
    )
    values["max_bytes"] = chosen
    return [f"memory: {format_size(chosen)}, {why}; --max-bytes changes it"]
