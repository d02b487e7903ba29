"""Sizes and positions: pure arithmetic, no IO."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tablespace.errors import GeometryError

PAGE_BYTES = 4096
DEFAULT_CONTAINER_BYTES = 1 << 30
# A container index and a slot index share one 64-bit location word in RAM with a pin count.
MAX_CONTAINERS = 1 << 24
MAX_SLOTS_PER_CONTAINER = 1 << 24
# The allocator and the index keep fixed arrays by pool.
MAX_POOLS = 16
# A transfer's length is 32 bits in io_uring.
MAX_SLOT_BYTES = 1 << 30
MAX_KEY_BYTES = 255
MAX_METADATA_BYTES = 255
# One group is one commit: two syncs. 256 blocks of 64 KiB are 16 MiB in flight.
MAX_GROUP_BLOCKS = 256

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"^\s*(\d{1,24}(?:\.\d{1,12})?)\s*([KMGT]?)(?:I?B)?\s*$", re.IGNORECASE)


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
    return int(Decimal(match[1]) * _UNITS[match[2].upper()])


def format_size(size_bytes: int) -> str:
    """Return a size for people: ``"64K"`` where exact, else one decimal (``"1.5G"``)."""
    for unit in ("T", "G", "M", "K"):
        scale = _UNITS[unit]
        if size_bytes >= scale:
            if size_bytes % scale == 0:
                return f"{size_bytes // scale}{unit}"
            return f"{size_bytes / scale:.1f}{unit}"
    return str(size_bytes)


@dataclass(frozen=True, init=False)
class Geometry:
    """The shape of a region.

    Parameters
    ----------
    slot_sizes : int or sequence of int
        Slot sizes in bytes, multiples of 4096; one pool each.
    container_bytes : int
        Size of a container file, a multiple of 4096.
    containers : int
        Number of container files.
    """

    slot_sizes: tuple[int, ...]
    container_bytes: int
    containers: int

    def __init__(
        self, slot_sizes: int | Sequence[int], container_bytes: int, containers: int
    ) -> None:
        sizes = (slot_sizes,) if isinstance(slot_sizes, int) else tuple(sorted(slot_sizes))
        object.__setattr__(self, "slot_sizes", sizes)
        object.__setattr__(self, "container_bytes", container_bytes)
        object.__setattr__(self, "containers", containers)
        self._check()

    def _check(self) -> None:
        if not 1 <= len(self.slot_sizes) <= MAX_POOLS or len(set(self.slot_sizes)) != len(
            self.slot_sizes
        ):
            raise GeometryError(
                f"a region has 1..{MAX_POOLS} different slot sizes, not {list(self.slot_sizes)}"
            )
        for size in self.slot_sizes:
            if not PAGE_BYTES <= size <= MAX_SLOT_BYTES or size % PAGE_BYTES:
                raise GeometryError(
                    f"slot_bytes must be a multiple of {PAGE_BYTES}, at most {MAX_SLOT_BYTES}, "
                    f"not {size}"
                )
        if self.container_bytes < self.slot_bytes or self.container_bytes % PAGE_BYTES:
            raise GeometryError(
                f"container_bytes must be a multiple of {PAGE_BYTES} and hold at least one slot "
                f"of {self.slot_bytes} bytes, not {self.container_bytes}"
            )
        if not 1 <= self.containers <= MAX_CONTAINERS:
            raise GeometryError(
                f"containers must be 1..{MAX_CONTAINERS}, not {self.containers} of "
                f"{self.container_bytes} bytes. Remedy: another max_bytes or container_bytes"
            )
        most = self.container_bytes // self.slot_sizes[0]
        if most > MAX_SLOTS_PER_CONTAINER:
            raise GeometryError(
                f"a container of {self.container_bytes} bytes has {most} slots; "
                f"at most {MAX_SLOTS_PER_CONTAINER} are supported: use smaller containers"
            )

    @property
    def slot_bytes(self) -> int:
        """The largest slot size: the largest value."""
        return self.slot_sizes[-1]

    @property
    def slots_per_container(self) -> tuple[int, ...]:
        """Slots a container has in each pool."""
        return tuple(self.container_bytes // size for size in self.slot_sizes)

    @property
    def capacity(self) -> int:
        """Number of slots in the whole region, were all of them of the smallest size."""
        return self.slots_per_container[0] * self.containers

    @property
    def data_bytes(self) -> int:
        return self.container_bytes * self.containers

    def __str__(self) -> str:
        sizes = ", ".join(format_size(size) for size in self.slot_sizes)
        return (
            f"{self.containers} containers of {format_size(self.container_bytes)} "
            f"in slots of {sizes}"
        )


def _size_of(name: str, size: int | str) -> int:
    """Return the bytes that an option asks for; the option's name is in the error."""
    try:
        return parse_size(size)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def plan_geometry(
    max_bytes: int | str,
    container_bytes: int | str | None,
    slot_bytes: int | str | Sequence[int | str],
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
    budget = _size_of("max_bytes", max_bytes)
    # Bytes are numbers to iterate over: b"4K" would be two slot sizes.
    if isinstance(slot_bytes, Iterable) and not isinstance(slot_bytes, (str, bytes, bytearray)):
        listed: list[Any] = list(slot_bytes)
    else:
        listed = [slot_bytes]
    sizes = sorted(_size_of("slot_bytes", size) for size in listed)
    if not sizes:
        raise GeometryError("slot_bytes names no size; give one, or a list of sizes")
    slot = sizes[-1]
    if container_bytes is None:
        container = min(DEFAULT_CONTAINER_BYTES, budget // 4)
        container -= container % PAGE_BYTES
        # Whole slots of the largest size, so that no container ends in a tail nobody can use.
        if slot and container >= slot:
            container -= container % slot
        if container < slot:
            raise ValueError(
                f"max_bytes={budget} is too small: four containers of at least one "
                f"{slot}-byte slot each are needed. Raise max_bytes or lower slot_bytes"
            )
    else:
        container = _size_of("container_bytes", container_bytes)
        if container > budget // 4:
            raise ValueError(
                f"container_bytes={container} is above a quarter of max_bytes={budget}. "
                f"Remedy: container_bytes of at most {budget // 4}, or a larger max_bytes"
            )
    if container <= 0:
        raise ValueError(f"container_bytes must be positive, not {container}")
    return Geometry(sizes, container, budget // container)


# Hex of the longest key and metadata, and the other columns of a snapshot's entry.
MAX_ENTRY_TEXT_BYTES = 2 * (MAX_KEY_BYTES + MAX_METADATA_BYTES) + 68
MIN_JOURNAL_BYTES = 64 << 20


def index_bound_bytes(geometry: Geometry) -> int:
    """Return what journals and snapshots come to at most: .bak, spare and one more of each."""
    snapshot = geometry.capacity * MAX_ENTRY_TEXT_BYTES + (1 << 20)
    journal = max(MIN_JOURNAL_BYTES, snapshot) + (2 << 20)
    return 4 * snapshot + 4 * journal


def container_name(container_index: int) -> str:
    """Return the file name of a container: a number, four digits or more."""
    return f"{container_index:04d}.bin"
