"""The flags of the long tier: names, defaults, and what is wrong with them when something is."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

import tablespace
from kvd.arena_layout import PAGE_BYTES
from kvd.errors import ConfigError
from tablespace import format_size

MAX_SLOT_BYTES = 32 << 20  # Must fit a frame; larger is a typing error, not a block.
MAX_SLOT_SIZES = 16  # A region has no more.
DEFAULT_SLOT_BYTES = 64 << 10
MAX_PATHS = 64
MAX_WORKERS = 64
AUTO = "auto"


@dataclass(frozen=True)
class LongFlags:
    """What the long tier runs with, checked.

    Attributes
    ----------
    paths : tuple of Path
        Where the regions are; none without a long tier.
    long_bytes : int
        Budget of all paths together, each an equal share of it.
    slot_sizes : tuple of int
        Of every region; with `auto_slots` those to begin with.
    """

    paths: tuple[Path, ...]
    long_bytes: int
    slot_sizes: tuple[int, ...]
    auto_slots: bool = False
    container_bytes: int | None = None
    flush_interval_ms: int = 0
    io_mode: str = "auto"
    workers: int = 8
    timeout_ms: int = 2000
    recover: str = "salvage"
    follow: tuple[Path, ...] = ()
    scrub_rate: int = 0
    admission: str = "all"
    write_budget: int = 0
    free_floor: int = 0

    @property
    def slot_bytes(self) -> int:
        """Return the largest slot."""
        return self.slot_sizes[-1]

    @property
    def path_bytes(self) -> int:
        """Return each path's share of the budget."""
        return self.long_bytes // max(1, len(self.paths))


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the group of the long tier."""
    disk = parser.add_argument_group("long tier")
    add = disk.add_argument
    add("--long-path", metavar="DIR", help="directory of the region (default: no long tier)")
    add("--long-paths", metavar="DIR,DIR", help="several, best each on a disk of its own")
    add(
        "--long-bytes",
        metavar="SIZE",
        default="32G",
        help="all paths together, each an equal share (default: 32G)",
    )
    add("--follow", metavar="DIR,DIR", help="regions of other hosts, read after the own ones")
    add(
        "--tablespace-slot-bytes",
        metavar="SIZE",
        default="64K",
        help="slot size in memory and on disk (default: 64K); a list is several sizes on disk, "
        "'auto' adds those that clients announce; larger values are not stored",
    )
    add("--tablespace-container-bytes", metavar="SIZE", help="(default: 1G, or a quarter)")
    add(
        "--tablespace-flush-interval-ms",
        metavar="MS",
        default="0",
        help="how long a write group waits to be filled (default: 0)",
    )
    add("--io-mode", choices=("auto", "direct", "buffered"), default="auto")
    add("--long-workers-per-shard", metavar="N", default="8", help="reads at once (default: 8)")
    add("--long-timeout-ms", metavar="MS", default="2000", help="then a miss (default: 2000)")
    add(
        "--recover",
        choices=("salvage", "strict", "empty"),
        default="salvage",
        help="what a damaged region means: keep what is sound, refuse, or begin anew",
    )
    add(
        "--scrub-rate",
        metavar="BYTES/s",
        default="0",
        help="read values in the background and drop damaged ones (default: 0, off)",
    )
    add(
        "--admission",
        choices=("all", "second-hit"),
        default="all",
        help="second-hit: write only what was stored or used before (default: all)",
    )
    add("--write-budget", metavar="BYTES/s", default="0", help="(default: 0, no limit)")
    add(
        "--free-floor",
        metavar="SIZE",
        default="0",
        help="write nothing while the file system has less free (default: 0)",
    )


def read_flags(flags: argparse.Namespace) -> LongFlags:
    """Check what the flags say.

    Raises
    ------
    ConfigError
        Naming the flag, what is wrong and the remedy.
    """
    sizes, auto = _slot_sizes(flags.tablespace_slot_bytes)
    long_bytes = _size("--long-bytes", flags.long_bytes)
    paths = _paths(flags.long_path, flags.long_paths)
    found = LongFlags(
        paths=paths,
        long_bytes=long_bytes,
        slot_sizes=sizes,
        auto_slots=auto,
        container_bytes=_container_bytes(flags.tablespace_container_bytes),
        flush_interval_ms=_whole(
            "--tablespace-flush-interval-ms", flags.tablespace_flush_interval_ms, 0, 60_000
        ),
        io_mode=flags.io_mode,
        workers=_whole("--long-workers-per-shard", flags.long_workers_per_shard, 1, MAX_WORKERS),
        timeout_ms=_whole("--long-timeout-ms", flags.long_timeout_ms, 1, 3_600_000),
        recover=flags.recover,
        follow=_follow(flags.follow, paths),
        scrub_rate=_rate("--scrub-rate", flags.scrub_rate),
        admission=flags.admission,
        write_budget=_rate("--write-budget", flags.write_budget),
        free_floor=_size("--free-floor", flags.free_floor, least=0),
    )
    if paths and found.path_bytes < found.slot_bytes:
        share = f" for each of {len(paths)} paths" if len(paths) > 1 else ""
        raise ConfigError(
            f"--long-bytes {flags.long_bytes}: holds no slot of "
            f"{format_size(found.slot_bytes)}{share}; "
            "give more, or leave --long-path out to run without a long tier"
        )
    if found.follow and not paths:
        raise ConfigError(
            "--follow: needs a long tier of its own; give --long-path too, small if it is to be"
        )
    return found


def _size(flag: str, text: str, *, least: int = 1) -> int:
    try:
        size = tablespace.parse_size(text)
    except (ValueError, TypeError):
        size = -1
    if size < least:
        raise ConfigError(f"{flag} {text}: not a size; write bytes or K, M, G, T: 512M, 8G")
    return size


def _rate(flag: str, text: str) -> int:
    return _size(flag, text.removesuffix("/s"), least=0)


def _whole(flag: str, text: str, least: int, most: int) -> int:
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if not least <= number <= most:
        raise ConfigError(f"{flag} {text}: must be a whole number from {least} to {most}")
    return number


def _slot_sizes(text: str) -> tuple[tuple[int, ...], bool]:
    """Return the sizes, smallest first, and whether clients may add to them."""
    if text == AUTO:
        return (DEFAULT_SLOT_BYTES,), True
    sizes = set()
    for part in text.split(","):
        size = _size("--tablespace-slot-bytes", part.strip())
        if size % PAGE_BYTES or not PAGE_BYTES <= size <= MAX_SLOT_BYTES:
            raise ConfigError(
                f"--tablespace-slot-bytes {part}: must be a multiple of 4K "
                f"between 4K and {format_size(MAX_SLOT_BYTES)}, for example 64K"
            )
        sizes.add(size)
    if len(sizes) > MAX_SLOT_SIZES:
        raise ConfigError(
            f"--tablespace-slot-bytes {text}: at most {MAX_SLOT_SIZES} sizes; name fewer"
        )
    return tuple(sorted(sizes)), False


def _container_bytes(text: str | None) -> int | None:
    if text is None:
        return None
    size = _size("--tablespace-container-bytes", text)
    if size % PAGE_BYTES:
        raise ConfigError(
            f"--tablespace-container-bytes {text}: must be a multiple of 4K, for example 1G"
        )
    return size


def _paths(one: str | None, several: str | None) -> tuple[Path, ...]:
    if one is not None and several is not None:
        raise ConfigError("--long-path and --long-paths: give one of them")
    if one is None and several is None:
        return ()
    flag, text = ("--long-path", one) if one is not None else ("--long-paths", several)
    texts = (
        [one or ""] if one is not None else [part.strip() for part in (several or "").split(",")]
    )
    paths = [_directory(flag, part, must_be_usable=len(texts) == 1) for part in texts]
    if len(paths) > MAX_PATHS:
        raise ConfigError(f"{flag} {text}: at most {MAX_PATHS} paths; name fewer")
    if len({os.path.realpath(path) for path in paths}) < len(paths):
        raise ConfigError(f"{flag} {text}: names a directory twice; name each once")
    return tuple(paths)


def _follow(text: str | None, own: tuple[Path, ...]) -> tuple[Path, ...]:
    if text is None:
        return ()
    paths = [
        _directory("--follow", part.strip(), must_be_usable=False) for part in text.split(",")
    ]
    for path in paths:
        if os.path.realpath(path) in {os.path.realpath(each) for each in own}:
            raise ConfigError(f"--follow {path}: is this daemon's own path; name other hosts'")
    return tuple(dict.fromkeys(paths))


def _directory(flag: str, text: str, *, must_be_usable: bool) -> Path:
    """Return a path; of several, one that cannot be used now is the daemon's to retry."""
    if not text:
        raise ConfigError(f"{flag}: empty; name a directory, or leave the flag out")
    path = Path(text).absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"{flag} {path}: is not a directory; name one")
    parent = path
    while not parent.exists():
        parent = parent.parent
    if must_be_usable and not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{flag} {path}: {parent} is not writable; choose another directory or "
            "change its permissions"
        )
    return path
