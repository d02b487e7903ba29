"""Command lines whose names may begin with a dash, as namespaces often do.

argparse takes `--models--M--x` for a misspelt option. Here what is no option of the command is a
name, an option's value may begin with a dash too, and after `--` everything is a name.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
DASHES = "\0--"  # Stands for a value that is `--` and nothing else, which argparse drops.
_AGE = re.compile(r"^(\d+(?:\.\d+)?)([smhdw]?)$")


class UsageError(Exception):
    """The command line asks for nothing that can be done; exit status 2."""


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError."""
        raise UsageError(f"{message}; {self.prog} --help says more")


class ToolParser(argparse.ArgumentParser):
    """An ArgumentParser that ends the process with one line, the remedy in it."""

    def error(self, message: str) -> NoReturn:
        """Say what is wrong and exit with 2."""
        self.exit(2, f"{self.prog}: {message}; {self.prog} --help says more\n")


def new_parser(
    command: str, description: str | None, *, usage: str | None = None, epilog: str | None = None
) -> Parser:
    """Return a parser with what every command has: --socket, --long-path, --json."""
    parser = Parser(
        prog=f"kvd {command}",
        description=description,
        allow_abbrev=False,
        usage=usage,
        epilog=epilog,
    )
    parser.add_argument(
        "--socket", metavar="PATH", help="a running daemon's (default: as clients)"
    )
    parser.add_argument(
        "--long-path",
        metavar="DIR",
        action="append",
        default=[],
        help="a stopped region's directory, instead of --socket; again for each further one",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def parse(parser: Parser, argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return the options, and the names that are left.

    Raises
    ------
    UsageError
    """
    takes_value = {
        option: action.nargs != 0 for action in parser._actions for option in action.option_strings
    }
    options: list[str] = []
    names: list[str] = []
    rest = iter(argv)
    for token in rest:
        head, equals, value = token.partition("=")
        if token == "--":
            names += rest
        elif token in takes_value:
            if not takes_value[token]:
                options.append(token)
                continue
            following = next(rest, None)
            if following is None:
                parser.error(f"{token} takes a value")
            options.append(f"{token}={DASHES if following == '--' else following}")
        elif equals and head in takes_value:
            options.append(f"{head}={DASHES}" if value == "--" else token)
        else:
            names.append(token)
    found = parser.parse_args(options)
    for option, given in vars(found).items():
        if isinstance(given, list):
            setattr(found, option, ["--" if each == DASHES else each for each in given])
        elif given == DASHES:
            setattr(found, option, "--")
    for text in argv:
        # What is sent and shown is UTF-8: bytes that are not name nothing here.
        if any("\ud800" <= char <= "\udfff" for char in text):
            parser.error(f"{text!r} is not UTF-8")
    return found, names


def seconds(option: str, text: str) -> float:
    """Return a time such as 7d, 12h, 30m, 90s in seconds; UsageError for anything else."""
    found = _AGE.match(text)
    if found is None:
        raise UsageError(f"{option}: {text!r} is no time; write for example 7d, 12h, 30m or 90s")
    return float(found[1]) * UNITS[found[2]]


def directories(options: argparse.Namespace) -> list[Path]:
    """Return the directories of the stopped region, none for a running daemon."""
    paths = [Path(part) for text in options.long_path for part in text.split(",") if part]
    if options.long_path and not paths:
        raise UsageError("--long-path: empty; name a directory")
    if paths and options.socket is not None:
        raise UsageError("--socket is for a running daemon, --long-path for a stopped region")
    return paths
