"""Sizes and positions: pure arithmetic, no IO."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tablespace.errors import GeometryError

PAGE_BYTES = 4096
DEFAULT_CONTAINER_BYTES = 1 << 30
# A container index and a slot index share one 64-bit location word in RAM with a pin count.
MAX_CONTAINERS = 1 << 24
MAX_SLOTS_PER_CONTAINER = 1 << 24
# A transfer's length is 32 bits in io_uring.
MAX_SLOT_BYTES = 1 << 30
MAX_KEY_BYTES = 255
MAX_METADATA_BYTES = 255
# One group is one commit: two syncs. 256 blocks of 64 KiB are 16 MiB in flight.
MAX_GROUP_BLOCKS = 256

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:I?B)?\s*$", re.IGNORECASE)


def ceil_div(number: int, divisor: int) -> int:
    """Divide, rounding up."""
    return -(-number // divisor)


def ceil_to(number: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-number // multiple) * multiple


def parse_size(size: int | str) -> int:
    """Return a number of bytes from an int or from text such as ``"64K"`` or ``"1.5G"``.

    Parameters
    ----------
    size : int or str
        Units K, M, G, T are powers of 1024; a trailing B or iB is ignored.

    Raises
    ------
    ValueError
        When the text is no size, or is negative.
    """
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        raise ValueError(f"not a size: {size!r}. Give bytes, or text such as '64K' or '1G'")
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"a size cannot be negative: {size}")
        return size
    match = _SIZE.match(size)
    if match is None:
        raise ValueError(f"not a size: {size!r}. Give bytes, or text such as '64K' or '1G'")
    return (
        int(float(match[1]) * _UNITS[match[2].upper()])
        if "." in match[1]
        else int(match[1]) * _UNITS[match[2].upper()]
    )


def format_size(size_bytes: int) -> str:
    """Return a size for people: ``"64K"`` where exact, else one decimal (``"1.5G"``)."""
    for unit in ("T", "G", "M", "K"):
        scale = _UNITS[unit]
        if size_bytes >= scale:
            if size_bytes % scale == 0:
                return f"{size_bytes // scale}{unit}"
            return f"{size_bytes / scale:.1f}{unit}"
    return str(size_bytes)


@dataclass(frozen=True)
class Geometry:
    """The fixed shape of a region.

    Attributes
    ----------
    slot_bytes : int
        Size of a slot, a multiple of 4096.
    container_bytes : int
        Size of a container file, a multiple of 4096.
    containers : int
        Number of container files.
    """

    slot_bytes: int
    container_bytes: int
    containers: int

    def __post_init__(self) -> None:
        if not PAGE_BYTES <= self.slot_bytes <= MAX_SLOT_BYTES or self.slot_bytes % PAGE_BYTES:
            raise GeometryError(
                f"slot_bytes must be a multiple of {PAGE_BYTES}, at most {MAX_SLOT_BYTES}, "
                f"not {self.slot_bytes}"
            )
        if self.container_bytes < self.slot_bytes or self.container_bytes % PAGE_BYTES:
            raise GeometryError(
                f"container_bytes must be a multiple of {PAGE_BYTES} and hold at least one slot "
                f"of {self.slot_bytes} bytes, not {self.container_bytes}"
            )
        if not 1 <= self.containers <= MAX_CONTAINERS:
            raise GeometryError(f"containers must be 1..{MAX_CONTAINERS}, not {self.containers}")
        if self.slots_per_container > MAX_SLOTS_PER_CONTAINER:
            raise GeometryError(
                f"a container of {self.container_bytes} bytes has {self.slots_per_container} "
                f"slots; at most {MAX_SLOTS_PER_CONTAINER} are supported: use smaller containers"
            )

    @property
    def slots_per_container(self) -> int:
        return self.container_bytes // self.slot_bytes

    @property
    def capacity(self) -> int:
        """Number of slots in the whole region."""
        return self.slots_per_container * self.containers

    @property
    def data_bytes(self) -> int:
        return self.container_bytes * self.containers

    def __str__(self) -> str:
        return (
            f"{self.containers} containers of {format_size(self.container_bytes)} "
            f"in slots of {format_size(self.slot_bytes)}"
        )


def plan_geometry(
    max_bytes: int | str, container_bytes: int | str | None, slot_bytes: int | str
) -> Geometry:
    """Fit containers into a budget.

    `max_bytes` is rounded down to whole containers.  The default container (None) shrinks to a
    quarter of the budget when larger than that; an explicit one larger than the budget's quarter
    is refused.

    Raises
    ------
    ValueError
        When an explicit container is above a quarter of `max_bytes`, or nothing fits.
    """
    budget = parse_size(max_bytes)
    slot = parse_size(slot_bytes)
    if container_bytes is None:
        container = min(DEFAULT_CONTAINER_BYTES, budget // 4)
        container -= container % PAGE_BYTES
        # Whole slots, so that no container ends in a tail nobody can use.
        if slot and container >= slot:
            container -= container % slot
        if container < slot:
            raise ValueError(
                f"max_bytes={budget} is too small: four containers of at least one "
                f"{slot}-byte slot each are needed. Raise max_bytes or lower slot_bytes"
            )
    else:
        container = parse_size(container_bytes)
        if container > budget // 4:
            raise ValueError(
                f"container_bytes={container} is above a quarter of max_bytes={budget}. "
                f"Remedy: container_bytes of at most {budget // 4}, or a larger max_bytes"
            )
    if container <= 0:
        raise ValueError(f"container_bytes must be positive, not {container}")
    return Geometry(slot, container, budget // container)


def slot_offset(geometry: Geometry, slot_index: int) -> int:
    """Return the byte offset of a slot within its container."""
    return slot_index * geometry.slot_bytes


def container_name(container_index: int) -> str:
    """Return the file name of a container: a number, four digits or more."""
    return f"{container_index:04d}.bin"
