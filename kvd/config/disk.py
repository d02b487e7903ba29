"""Flags of the long tier."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import tablespace
from kvd.config.flag import choice, count, flag, flags_of, size
from kvd.config.policy import Policy
from kvd.config.values import Values
from kvd.long_limits import DEFAULT_SLOT_BYTES, MAX_SLOT_BYTES, MAX_SLOT_SIZES
from kvd.slab_geometry import PAGE_BYTES
from tablespace import format_size

TITLE = "long tier"
MAX_PATHS = 64
MAX_WORKERS = 64
CONTAINERS = 4  # As many at least in a region.
AUTO = "auto"


@dataclass(frozen=True)
class SlotSizes:
    """Sizes of slots, smallest first; with `auto` clients add to them."""

    sizes: tuple[int, ...]
    auto: bool = False

    @property
    def largest(self) -> int:
        """Return the size of the slots in memory."""
        return self.sizes[-1]


def part_directory(given: str) -> Path:
    """A directory among several; one that cannot be used now is retried while serving."""
    if not given:
        raise ValueError("empty; name a directory, or leave it out")
    path = Path(given).absolute()
    # Not the methods of Path: below a directory that may not be searched they raise.
    if os.path.exists(path) and not os.path.isdir(path):
        raise ValueError(f"{path} is not a directory; name one")
    return path


def directory(given: str) -> Path:
    """A directory that exists or can be made."""
    path = part_directory(given)
    parent = path
    while not os.path.exists(parent):
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ValueError(
            f"{parent} is not writable; choose another directory or change its permissions"
        )
    return path


def slot_sizes(given: str) -> SlotSizes:
    """Sizes that slots may have, or auto."""
    if given == AUTO:
        return SlotSizes((DEFAULT_SLOT_BYTES,), auto=True)
    sizes = set()
    for part in given.split(","):
        number = size(part.strip())
        if number % PAGE_BYTES or not PAGE_BYTES <= number <= MAX_SLOT_BYTES:
            raise ValueError(
                f"must be a multiple of 4K between 4K and {format_size(MAX_SLOT_BYTES)}, "
                "for example 64K"
            )
        sizes.add(number)
    if len(sizes) > MAX_SLOT_SIZES:
        raise ValueError(f"at most {MAX_SLOT_SIZES} sizes; name fewer")
    return SlotSizes(tuple(sorted(sizes)))


def page_multiple(given: str) -> int:
    """A size in whole pages."""
    number = size(given)
    if number % PAGE_BYTES:
        raise ValueError("must be a multiple of 4K, for example 1G")
    return number


def size_or_none(given: str) -> int:
    """Bytes; 0 is allowed."""
    try:
        number = tablespace.parse_size(given)
    except (ValueError, TypeError):
        number = -1
    if number < 0:
        raise ValueError("not a size; write bytes or K, M, G, T: 512M, 8G; 0 for none")
    return number


def rate(given: str) -> int:
    """Bytes a second; 0 is allowed."""
    return size_or_none(given.removesuffix("/s"))


@dataclass(frozen=True, kw_only=True)
class Disk:
    """See `kvd --help`."""

    long_path: Path | None = flag(
        "--long-path",
        directory,
        metavar="DIR",
        help="directory of the region (default: no long tier)",
    )
    long_paths: tuple[Path, ...] | None = flag(
        "--long-paths",
        part_directory,
        metavar="DIR,DIR",
        help="several, best each on a disk of its own",
        many=True,
    )
    long_backend: str = flag(
        "--long-backend",
        choice("tablespace"),
        default="tablespace",
        metavar="NAME",
        help="what the long tier is: tablespace, a region on disk",
    )
    long_bytes: int = flag(
        "--long-bytes",
        size,
        default="32G",
        help="hard cap of all paths together, each an equal share",
    )
    follow: tuple[Path, ...] | None = flag(
        "--follow",
        part_directory,
        metavar="DIR,DIR",
        help="long paths of other hosts, read after the own ones",
        many=True,
    )
    slots: SlotSizes = flag(
        "--tablespace-slot-bytes",
        slot_sizes,
        default="64K",
        help="slot size in memory and on disk; a list is several sizes, 'auto' adds on disk, too, "
        "those that clients announce; larger values are not stored",
    )
    container_bytes: int | None = flag(
        "--tablespace-container-bytes",
        page_multiple,
        help="size of a container file (default: 1G, or a quarter of a path's share if less)",
    )
    flush_interval_ms: int = flag(
        "--tablespace-flush-interval-ms",
        count(0, 60_000),
        default="0",
        metavar="MS",
        help="how long a write group that is not full waits for more blocks",
    )
    io_mode: str = flag(
        "--io-mode",
        choice("auto", "direct", "buffered"),
        default="auto",
        metavar="MODE",
        help="auto, direct (O_DIRECT) or buffered (page cache)",
    )
    long_workers: int = flag(
        "--long-workers-per-shard",
        count(1, MAX_WORKERS),
        default="8",
        metavar="N",
        help="read calls under way at once on each path",
    )
    long_timeout_ms: int = flag(
        "--long-timeout-ms",
        count(1, 3_600_000),
        default="2000",
        metavar="MS",
        help="a read that takes longer is a miss",
    )
    recover: str = flag(
        "--recover",
        choice("salvage", "strict", "empty"),
        default="salvage",
        metavar="MODE",
        help="what a damaged region means: salvage what is sound, strict (refuse), empty",
    )
    scrub_rate: int = flag(
        "--scrub-rate",
        rate,
        default="0",
        metavar="BYTES/s",
        help="read values in the background and drop damaged ones; 0: off",
    )
    admission: str = flag(
        "--admission",
        choice("all", "second-hit"),
        default="all",
        metavar="WHAT",
        help="second-hit: write only what was stored or used before",
    )
    write_budget: int = flag(
        "--write-budget",
        rate,
        default="0",
        metavar="BYTES/s",
        help="write no more than this to the long tier; 0: no limit",
    )
    free_floor: int = flag(
        "--free-floor",
        size_or_none,
        default="0",
        help="write nothing while the file system has less free",
    )

    @property
    def paths(self) -> tuple[Path, ...]:
        """Return every path of the long tier."""
        if self.long_path is not None:
            return (self.long_path,)
        return self.long_paths or ()

    @property
    def path_bytes(self) -> int:
        """Return each path's share of the budget."""
        return self.long_bytes // max(1, len(self.paths))

    @property
    def slot_bytes(self) -> int:
        """Return the size of the slots in memory: the largest."""
        return self.slots.largest


def settle(values: Values) -> list[str]:
    """Check the long tier against the slots and against memory."""
    if values["long_path"] is not None and values["long_paths"] is not None:
        raise values.wrong("long_paths", "--long-path is given too; give one of them")
    one = values["long_path"]
    paths = (values["long_paths"] or ()) if one is None else (one,)
    own = {os.path.realpath(path) for path in paths}
    if len(paths) > MAX_PATHS:
        raise values.wrong("long_paths", f"at most {MAX_PATHS} paths; name fewer")
    if len(own) < len(paths):
        raise values.wrong("long_paths", "names a directory twice; name each once")
    _check_followed(values, own)
    if not paths:
        aside = [name for field, name in _long_only() if values.asked(field)]
        if not aside:
            return []
        return [f"left aside, as there is no long tier: {', '.join(aside)}; --long-path adds one"]
    long_bytes, max_bytes = values["long_bytes"], values["max_bytes"]
    slots: SlotSizes = values["slots"]
    # The engine's rules, here so that they are told of the flags, and by --check too.
    most = long_bytes // len(paths) // CONTAINERS
    if most < slots.largest:
        share = f" for each of {len(paths)} paths" if len(paths) > 1 else ""
        raise values.wrong(
            "long_bytes",
            f"holds no {CONTAINERS} containers with a slot of {format_size(slots.largest)}"
            f"{share}; give more, or leave --long-path out to run without a long tier",
        )
    least = PAGE_BYTES if slots.auto else slots.largest
    container_bytes = values["container_bytes"]
    if container_bytes is not None and not least <= container_bytes <= most:
        raise values.wrong(
            "container_bytes",
            f"must be from {format_size(least)}, a slot, to {format_size(most)}, a quarter of a "
            "path's share of --long-bytes; choose one, or leave it out",
        )
    if long_bytes < max_bytes:
        return [
            f"advice: the long tier ({format_size(long_bytes)}) is smaller than memory "
            f"({format_size(max_bytes)}), so it will churn; raise --long-bytes"
        ]
    return []


def _long_only() -> list[tuple[str, str]]:
    """Return fields and names of the flags that mean nothing without a long tier."""
    flags = {**flags_of(Disk), **flags_of(Policy)}
    # Memory has slots and a policy, too.
    return [
        (field, flag.name)
        for field, flag in flags.items()
        if field not in ("slots", "evict_policy")
    ]


def _check_followed(values: Values, own: set[str]) -> None:
    followed = values["follow"] or ()
    if followed and not own:
        raise values.wrong(
            "follow", "needs a long tier of its own; give --long-path too, small if it is to be"
        )
    for path in followed:
        if os.path.realpath(path) in own:
            raise values.wrong("follow", f"{path} is this daemon's own path; name other hosts'")
