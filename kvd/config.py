"""The daemon's flags: names, defaults, and what is wrong with them when something is."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tablespace
from kvd.arena_layout import PAGE_BYTES
from kvd.errors import ConfigError
from kvd.machine_memory import free_bytes
from kvd.policy.rules import DEFAULT_POLICY, POLICIES
from kvd.region_eviction import EvictionFlags
from kvd.socket_path import default_socket
from kvd.version import __version__
from tablespace import format_size

DEFAULT_MAX_BYTES = 8 << 30
MAX_SLOT_BYTES = 32 << 20  # Must fit a frame; larger is a typing error, not a block.
LOG_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Config:
    """What the daemon runs with, checked.

    Attributes
    ----------
    notes : tuple of str
        Sentences for the banner: what was chosen without being asked for.
    """

    socket: str
    max_bytes: int
    long_path: Path | None
    long_bytes: int
    slot_bytes: int
    io_mode: str
    log_level: str
    drain_timeout_s: float
    evict: EvictionFlags
    notes: tuple[str, ...] = ()


def parse(argv: Sequence[str]) -> Config:
    """Turn the command line into a Config.

    Raises
    ------
    ConfigError
        Naming the flag, what is wrong and the remedy.
    SystemExit
        From argparse: 0 for --help, 2 for unknown flags.
    """
    flags = _parser().parse_args(argv)
    slot_bytes = _size("--tablespace-slot-bytes", flags.tablespace_slot_bytes)
    if slot_bytes % PAGE_BYTES or not PAGE_BYTES <= slot_bytes <= MAX_SLOT_BYTES:
        raise ConfigError(
            f"--tablespace-slot-bytes {flags.tablespace_slot_bytes}: must be a multiple of 4K "
            f"between 4K and {format_size(MAX_SLOT_BYTES)}, for example 64K"
        )
    if flags.socket == "":
        raise ConfigError("--socket: empty; name a path, or leave the flag out for the default")
    max_bytes, notes = _memory_budget(flags.max_bytes, slot_bytes)
    long_bytes = _size("--long-bytes", flags.long_bytes)
    long_path = _long_path(flags.long_path)
    if long_path is not None and long_bytes < slot_bytes:
        raise ConfigError(
            f"--long-bytes {flags.long_bytes}: holds no slot of {format_size(slot_bytes)}; "
            "give more, or leave --long-path out to run without a long tier"
        )
    if long_path is not None and long_bytes < max_bytes:
        notes.append(
            f"advice: the long tier ({format_size(long_bytes)}) is smaller than memory "
            f"({format_size(max_bytes)}), so it will churn; raise --long-bytes"
        )
    return Config(
        socket=flags.socket or default_socket(),
        max_bytes=max_bytes,
        long_path=long_path,
        long_bytes=long_bytes,
        slot_bytes=slot_bytes,
        io_mode=flags.io_mode,
        log_level=flags.log_level,
        drain_timeout_s=_seconds("--drain-timeout", flags.drain_timeout),
        notes=tuple(notes),
        evict=EvictionFlags(
            flags.evict_policy,
            _share("--watermark", flags.watermark),
            _share("--evict-ratio", flags.evict_ratio),
        ),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvd",
        allow_abbrev=False,
        description="Serve a tiered KV cache to every engine on this host. No flag is required.",
        epilog="Commands: kvd replay, kvd size, kvd statctl, kvd demo; each has its own --help. "
        "Sizes take K, M, G, T.",
    )
    parser.add_argument("--version", action="version", version=f"kvd {__version__}")
    serving = parser.add_argument_group("serving")
    serving.add_argument(
        "--socket",
        metavar="PATH",
        help="Unix socket (default: /var/run/kvd.sock, or $XDG_RUNTIME_DIR/kvd.sock)",
    )
    serving.add_argument("--log-level", choices=LOG_LEVELS, default="info")
    serving.add_argument(
        "--drain-timeout", metavar="SECONDS", default="20s", help="at SIGTERM (default: 20s)"
    )
    memory = parser.add_argument_group("memory tier")
    memory.add_argument(
        "--max-bytes",
        metavar="SIZE",
        help="size of the shared arena (default: 8G, or half of what is free if less)",
    )
    evict = parser.add_argument_group("eviction")
    evict.add_argument(
        "--evict-policy",
        choices=POLICIES,
        default=DEFAULT_POLICY,
        help="in both tiers (default: value)",
    )
    evict.add_argument(
        "--watermark",
        metavar="SHARE",
        default="0.9",
        help="of the long tier in use, at which room is made in the background; 1.0: only when "
        "a write needs it (default: 0.9)",
    )
    evict.add_argument(
        "--evict-ratio",
        metavar="SHARE",
        default="0.1",
        help="of what is in use that goes then (default: 0.1)",
    )
    disk = parser.add_argument_group("long tier")
    disk.add_argument(
        "--long-path", metavar="DIR", help="directory of the region (default: no long tier)"
    )
    disk.add_argument("--long-bytes", metavar="SIZE", default="32G", help="(default: 32G)")
    disk.add_argument(
        "--tablespace-slot-bytes",
        metavar="SIZE",
        default="64K",
        help="slot size in memory and on disk (default: 64K); larger values are not stored",
    )
    disk.add_argument("--io-mode", choices=("auto", "direct", "buffered"), default="auto")
    return parser


def _size(flag: str, text: str) -> int:
    try:
        size = tablespace.parse_size(text)
    except (ValueError, TypeError):
        size = -1
    if size <= 0:
        raise ConfigError(f"{flag} {text}: not a size; write bytes or K, M, G, T: 512M, 8G")
    return size


def _share(flag: str, text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 < share <= 1:
        raise ConfigError(f"{flag} {text}: not a share above 0, at most 1; write for example 0.9")
    return share


def _seconds(flag: str, text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise ConfigError(f"{flag} {text}: not a time in seconds; write for example 20s")
    return seconds


def _long_path(text: str | None) -> Path | None:
    if text is None:
        return None
    if not text:
        raise ConfigError("--long-path: empty; name a directory, or leave the flag out")
    path = Path(text).absolute()
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--long-path {path}: is not a directory; name one")
    parent = path
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(
            f"--long-path {path}: {parent} is not writable; choose another directory or "
            "change its permissions"
        )
    return path


def _memory_budget(text: str | None, slot_bytes: int) -> tuple[int, list[str]]:
    """Return the arena's size and what to say about it."""
    free, bound = free_bytes()
    if text is not None:
        asked = _size("--max-bytes", text)
        if asked < slot_bytes:
            raise ConfigError(
                f"--max-bytes {text}: holds no slot of {format_size(slot_bytes)}; give more or "
                "lower --tablespace-slot-bytes"
            )
        if asked > free:
            raise ConfigError(
                f"--max-bytes {text} asks for {asked} bytes, {bound} has {free} bytes free; "
                f"ask for at most {free // (1 << 20)}M or free memory"
            )
        return asked // slot_bytes * slot_bytes, []
    chosen = min(DEFAULT_MAX_BYTES, free // 2) // slot_bytes * slot_bytes
    if chosen < slot_bytes:
        raise ConfigError(
            f"{bound} has {free} bytes free, too few for one slot of {slot_bytes}; free memory"
        )
    why = (
        "the default"
        if chosen == DEFAULT_MAX_BYTES
        else f"half of the {free // (1 << 20)}M that {bound} has free"
    )
    return chosen, [f"memory: {format_size(chosen)}, {why}; --max-bytes changes it"]
