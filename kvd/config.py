"""The daemon's flags: names, defaults, and what is wrong with them when something is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import tablespace
from kvd.errors import ConfigError
from kvd.long_flags import LongFlags, add_flags, read_flags
from kvd.machine_memory import free_bytes
from kvd.socket_path import default_socket
from kvd.version import __version__
from tablespace import format_size

DEFAULT_MAX_BYTES = 8 << 30
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
    long: LongFlags
    slot_bytes: int
    log_level: str
    drain_timeout_s: float
    notes: tuple[str, ...] = ()

    @property
    def long_path(self) -> Path | None:
        """Return the first path of the long tier."""
        return next(iter(self.long.paths), None)

    @property
    def long_bytes(self) -> int:
        """Return the budget of the long tier."""
        return self.long.long_bytes


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
    long_flags = read_flags(flags)
    # Memory has slots of one size: the largest.
    slot_bytes = long_flags.slot_bytes
    if flags.socket == "":
        raise ConfigError("--socket: empty; name a path, or leave the flag out for the default")
    max_bytes, notes = _memory_budget(flags.max_bytes, slot_bytes)
    if long_flags.paths and long_flags.long_bytes < max_bytes:
        notes.append(
            f"advice: the long tier ({format_size(long_flags.long_bytes)}) is smaller than memory "
            f"({format_size(max_bytes)}), so it will churn; raise --long-bytes"
        )
    return Config(
        socket=flags.socket or default_socket(),
        max_bytes=max_bytes,
        long=long_flags,
        slot_bytes=slot_bytes,
        log_level=flags.log_level,
        drain_timeout_s=_seconds("--drain-timeout", flags.drain_timeout),
        notes=tuple(notes),
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvd",
        allow_abbrev=False,
        description="Serve a tiered KV cache to every engine on this host. No flag is required.",
        epilog="Commands: kvd replay, kvd statctl, kvd demo; each has its own --help. "
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
    add_flags(parser)
    return parser


def _size(flag: str, text: str) -> int:
    try:
        size = tablespace.parse_size(text)
    except (ValueError, TypeError):
        size = -1
    if size <= 0:
        raise ConfigError(f"{flag} {text}: not a size; write bytes or K, M, G, T: 512M, 8G")
    return size


def _seconds(flag: str, text: str) -> float:
    try:
        seconds = float(text.removesuffix("s"))
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= 86400:
        raise ConfigError(f"{flag} {text}: not a time in seconds; write for example 20s")
    return seconds


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
