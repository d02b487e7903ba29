"""The daemon's flags: read from the command line, a file and the environment, and checked.

Flags win over environment variables, those win over the file of --config. A new flag is one
field in the module of its group, read as ``config.<field>``; --help, the file, the environment
and docs/cli.md follow from it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvd.config import disk, memory, policy, serving, sight
from kvd.config.command_line import build_parser, read_command_line
from kvd.config.environment import read_environment
from kvd.config.file import read_file
from kvd.config.flag import Flag, flags_of
from kvd.config.values import Given, Values

__all__ = ["GROUPS", "Config", "all_flags", "parse", "parser"]


@dataclass(frozen=True, kw_only=True)
class Config(serving.Serving, memory.Memory, disk.Disk, policy.Policy, sight.Sight):
    """What the daemon runs with, checked: the fields of every group.

    Attributes
    ----------
    notes : tuple of str
        Sentences for the banner: what was chosen without being asked for.
    """

    notes: tuple[str, ...] = ()


GROUPS: tuple[tuple[str, type], ...] = (
    (serving.TITLE, serving.Serving),
    (memory.TITLE, memory.Memory),
    (disk.TITLE, disk.Disk),
    (policy.TITLE, policy.Policy),
    (sight.TITLE, sight.Sight),
)


def all_flags() -> dict[str, Flag]:
    """Return every flag by field name, in the order of --help."""
    return {field: flag for _, group in GROUPS for field, flag in flags_of(group).items()}


def parse(argv: Sequence[str], environment: Mapping[str, str] | None = None) -> Config:
    """Turn the command line, the file and the environment into a Config.

    Raises
    ------
    ConfigError
        Naming the flag, what is wrong and the remedy.
    SystemExit
        0, for --help and --version.
    """
    flags = all_flags()
    line = read_command_line(argv, GROUPS)
    given: dict[str, Given] = {}
    if line.file is not None:
        given |= read_file(line.file, flags)
    variables, renamed, unknown = read_environment(
        os.environ if environment is None else environment, flags
    )
    given |= variables
    given |= line.given
    notes = []
    if renamed:
        pairs = ", ".join(f"{old} is now {new}" for old, new in renamed.items())
        notes.append(f"deprecated names are still taken: {pairs}")
    if unknown:
        notes.append(f"not understood and left aside: {', '.join(unknown)}")
    values = Values(flags, given)
    for group in (serving, memory, disk, policy, sight):
        notes += group.settle(values)
    return Config(**values.values, notes=tuple(notes))


def parser() -> argparse.ArgumentParser:
    """Return the argparse parser, for the tool that writes docs/cli.md."""
    return build_parser(GROUPS)
