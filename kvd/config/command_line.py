"""The command line: an argparse parser made of the groups, and what it found."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NoReturn

from kvd.commands import COMMANDS
from kvd.config.flag import flags_of
from kvd.config.names import nearest
from kvd.config.values import Given
from kvd.errors import ConfigError
from kvd.version import __version__

# Flags that are no settings: they stand on the command line only.
COMMAND_LINE_ONLY = {
    "--config": "TOML file with the same names, such as max-bytes = '8G'; flags win",
    "--check": "look whether the daemon would start here, and how well, and end",
    "--json": "with --check: one JSON document on stdout",
}
Groups = Sequence[tuple[str, type]]


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaints are one line, as those about values are."""

    def error(self, message: str) -> NoReturn:
        """Raise ConfigError."""
        raise ConfigError(f"{message}; kvd --help says more")


@dataclass
class CommandLine:
    """What stood there: texts by field name, and the file."""

    given: dict[str, Given] = field(default_factory=dict)
    file: str | None = None


def build_parser(groups: Groups) -> argparse.ArgumentParser:
    """Return a parser that keeps the texts; the values are read later, from every source alike."""
    parser = _Parser(
        prog="kvd",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
        description="Serve a tiered KV cache to every engine on this host. No flag is required.",
        epilog=f"Commands: kvd {', '.join(sorted(COMMANDS))}; each has its own --help. Sizes "
        "take K, M, G, T.",
    )
    parser.add_argument("--version", action="version", version=f"kvd {__version__}")
    for name, help_text in COMMAND_LINE_ONLY.items():
        if name == "--config":
            parser.add_argument(name, metavar="FILE", help=help_text)
        else:
            parser.add_argument(name, action="store_true", help=help_text)
    for title, group in groups:
        flags = flags_of(group)
        if not flags:
            continue
        section = parser.add_argument_group(title)
        for name, flag in flags.items():
            # argparse formats with %: a percent sign in a help text is one.
            text = flag.help.replace("%", "%%")
            if flag.default is not None:
                text += f" (default: {flag.default})"
            if flag.switch:
                section.add_argument(flag.name, dest=name, action="store_true", help=text)
            else:
                section.add_argument(
                    flag.name, dest=name, metavar=flag.metavar, action="append", help=text
                )
    return parser


def read_command_line(argv: Sequence[str], groups: Groups) -> CommandLine:
    """Return what the arguments say.

    Raises
    ------
    ConfigError
        For an unknown flag, naming the nearest, or one without its value.
    SystemExit
        0, for --help and --version.
    """
    parser = build_parser(groups)
    flags = {name: flag for _, group in groups for name, flag in flags_of(group).items()}
    known = [*COMMAND_LINE_ONLY, *(flag.name for flag in flags.values())]
    found, rest = parser.parse_known_args(argv)
    for argument in rest:
        name = argument.partition("=")[0]
        if name.startswith("-"):
            raise ConfigError(f"unknown flag {name}; {nearest(name, known)}")
        raise ConfigError(f"unexpected argument {argument!r}; flags start with --")
    if "json" in found and "check" not in found:
        raise ConfigError("--json: goes with --check; --log-format json is for the log")
    line = CommandLine()
    for name, value in vars(found).items():
        if f"--{name}" in COMMAND_LINE_ONLY:
            line.file = value if name == "config" else line.file
        elif flags[name].switch:
            line.given[name] = Given("true")
        else:
            line.given[name] = Given(",".join(value) if flags[name].many else value[-1])
    return line
