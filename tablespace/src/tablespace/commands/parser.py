"""The arguments of every command."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from typing import Any, NoReturn

from tablespace.commands import bench, listing, removal, upkeep, values
from tablespace.commands.failures import ArgumentsError
from tablespace.commands.keys import parse_bytes, parse_key
from tablespace.io.open import IO_ENGINES, IO_MODES
from tablespace.layout import MAX_SLOT_BYTES, parse_size

KEYS = """\
A key (also a prefix, also metadata) is text, or 'hex:' and hexadecimal digits (hex:00ff).
After '--' what begins with '-' is a key too.
"""
EXITS = """\
exit status: 0 fine, 1 damage found or a key absent, 2 could not run.
"""


class Parser(argparse.ArgumentParser):
    """A parser whose complaints are one line, as those of every command."""

    def error(self, message: str) -> NoReturn:
        """Leave with status 2."""
        raise ArgumentsError(f"{message}. Remedy: see '{self.prog} --help'")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Python before 3.13 drops "--" even where it is the one value (--prefix=--, or -- --).
        if action.nargs is None and arg_strings == ["--"]:
            return self._get_value(action, "--")
        return super()._get_values(action, arg_strings)


def _size(text: str) -> int:
    try:
        size_bytes = parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if size_bytes < 1:
        raise argparse.ArgumentTypeError(f"a size is at least 1 byte, not {text!r}")
    return size_bytes


def _value_size(text: str) -> int:
    size_bytes = _size(text)
    if size_bytes > MAX_SLOT_BYTES:
        raise argparse.ArgumentTypeError(f"a value has at most {MAX_SLOT_BYTES} bytes")
    return size_bytes


def _count(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {least} to {most}")
        return int(text)

    return parse


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0.01 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0.01 to 3600")
    return seconds


def _version() -> str:
    # The package is above this module: it is looked up when it is complete.
    return str(importlib.import_module("tablespace").__version__)


def build_parser() -> Parser:
    """Return the parser; a parsed command has its function as `run`."""
    parser = Parser(
        prog="python -m tablespace",
        description="Look into a tablespace region, change it, or measure the storage below it.",
        epilog=EXITS,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tablespace {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Callable[..., int], text: str, more: str = "") -> Parser:
        command: Parser = commands.add_parser(
            name,
            help=text,
            description=f"{text[0].upper()}{text[1:]}.",
            epilog=f"{more}\n{EXITS}" if more else EXITS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.set_defaults(run=run)
        command.add_argument("--json", action="store_true", help="one JSON document on stdout")
        return command

    _add_looking(add)
    _add_changing(add)
    _add_measuring(add)
    return parser


def _add_looking(add: Callable[..., Parser]) -> None:
    info = add("info", upkeep.run_info, "identity, geometry, files, the writer and its choices")
    info.add_argument("path", metavar="PATH", help="the region's directory")

    ls = add("ls", listing.run_ls, "list keys with length, place and sequence number", KEYS)
    ls.add_argument("path", metavar="PATH", help="the region's directory")
    ls.add_argument(
        "--prefix", type=parse_bytes, default=b"", help="only keys that begin with this"
    )
    ls.add_argument(
        "--limit", type=_count(0, 1 << 40), metavar="N", help="the first N keys (default: all)"
    )

    get = add("get", values.run_get, "write a value to standard output or a file", KEYS)
    get.add_argument("path", metavar="PATH", help="the region's directory")
    get.add_argument("key", metavar="KEY", type=parse_key)
    get.add_argument("-o", "--output", metavar="FILE", help="write it there")
    get.add_argument(
        "--force", action="store_true", help="write binary values to a terminal as well"
    )


def _add_changing(add: Callable[..., Parser]) -> None:
    put = add("put", values.run_put, "store a value, durably", KEYS)
    put.add_argument("path", metavar="PATH", help="the region's directory")
    put.add_argument("key", metavar="KEY", type=parse_key)
    put.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        default="-",
        help="the value; standard input if - or none",
    )
    put.add_argument("--metadata", type=parse_bytes, help="kept with the key, at most 255 bytes")
    put.add_argument(
        "--evict", action="store_true", help="in a full region evict the least recently used"
    )
    put.add_argument(
        "--create", type=_size, metavar="SIZE", help="make a region of SIZE where there is none"
    )
    put.add_argument(
        "--slot-bytes", type=_size, metavar="SIZE", help="its slots, with --create (default 64K)"
    )

    rm = add("rm", removal.run_rm, "delete keys, durably", KEYS)
    rm.add_argument("path", metavar="PATH", help="the region's directory")
    rm.add_argument("keys", metavar="KEY", nargs="*", type=parse_key)
    rm.add_argument("--prefix", type=parse_bytes, help="every key that begins with this")
    rm.add_argument("--yes", action="store_true", help="needed where --prefix is empty")

    check = add("check", upkeep.run_check, "look for damage in a region that nobody writes")
    check.add_argument("path", metavar="PATH", help="the region's directory")
    check.add_argument("--repair", action="store_true", help="and repair what can be repaired")

    compact = add("compact", upkeep.run_compact, "write a snapshot and start a new journal")
    compact.add_argument("path", metavar="PATH", help="the region's directory")


def _add_measuring(add: Callable[..., Parser]) -> None:
    classified = add(
        "classify", upkeep.run_classify, "what storage a path is on, and what follows"
    )
    classified.add_argument("path", metavar="PATH", help="a region, or where one might be")

    measured = add(
        "bench", bench.run_bench, "measure a region made under a directory and removed afterwards"
    )
    measured.add_argument("path", metavar="PATH", help="an existing directory")
    measured.add_argument(
        "--seconds", type=_seconds, default=3.0, help="for each of the three phases (default 3)"
    )
    measured.add_argument(
        "--value-size", type=_value_size, default=65536, metavar="SIZE", help="default 64K"
    )
    measured.add_argument(
        "--batch", type=_count(1, 4096), default=64, metavar="N", help="values a call (default 64)"
    )
    measured.add_argument(
        "--threads", type=_count(1, 256), default=16, metavar="N", help="that put (default 16)"
    )
    measured.add_argument(
        "--max-bytes", type=_size, default=1 << 30, metavar="SIZE", help="the region (default 1G)"
    )
    measured.add_argument("--io-mode", choices=IO_MODES, default="auto")
    measured.add_argument("--io-engine", choices=IO_ENGINES, default="auto")


def wants_json(arguments: list[str] | None) -> bool:
    """Say whether arguments that could not be parsed ask for JSON."""
    return "--json" in (sys.argv[1:] if arguments is None else arguments)
