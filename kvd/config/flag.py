"""One flag: its name, how its text becomes a value, what --help says; and the common readers.

A flag is a field of its group's dataclass, made by `flag`. A reader takes the text and returns
the value, or raises ValueError saying what is wrong and what to write; whoever calls it adds
which flag that was and where its text stood.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tablespace

MAX_SECONDS = 86400.0


@dataclass(frozen=True)
class Flag:
    """What is known of one flag.

    Attributes
    ----------
    default : str or None
        As the user would write it; None where the field's value is None (or, of a switch, False)
        until something is given.
    switch : bool
        Takes no value on the command line.
    many : bool
        Several values, with commas between them or by giving the flag several times: a tuple.
    """

    name: str
    read: Callable[[str], Any]
    default: str | None
    metavar: str
    help: str
    switch: bool = False
    many: bool = False

    def value(self, given: str) -> Any:
        """Return what a text means; ValueError says what is wrong with it."""
        if self.many:
            return tuple(self.read(part.strip()) for part in given.split(","))
        return self.read(given)


def flag(
    name: str,
    read: Callable[[str], Any],
    *,
    default: str | None = None,
    metavar: str = "SIZE",
    help: str,
    many: bool = False,
) -> Any:
    """Return the dataclass field of a flag with a value."""
    return dataclasses.field(
        metadata={"flag": Flag(name, read, default, metavar, help, many=many)}
    )


def switch(name: str, *, help: str) -> Any:
    """Return the dataclass field of a flag that is there or not."""
    return dataclasses.field(metadata={"flag": Flag(name, yes_or_no, None, "", help, switch=True)})


def flags_of(group: type) -> dict[str, Flag]:
    """Return a group's flags by field name."""
    return {
        field.name: field.metadata["flag"]
        for field in dataclasses.fields(group)
        if "flag" in field.metadata
    }


# Readers.


def text(given: str) -> str:
    """Anything but nothing."""
    if not given:
        raise ValueError("empty; give a value, or leave it out for the default")
    return given


def size(given: str) -> int:
    """Bytes, above 0."""
    try:
        number = tablespace.parse_size(given)
    except (ValueError, TypeError):
        number = -1
    if number <= 0:
        raise ValueError("not a size; write bytes or K, M, G, T: 512M, 8G")
    return number


def seconds(given: str) -> float:
    """A time of at most a day."""
    try:
        number = float(given.removesuffix("s"))
    except ValueError:
        number = -1.0
    if not 0 <= number <= MAX_SECONDS:
        raise ValueError("not a time in seconds; write for example 20s")
    return number


def count(least: int, most: int) -> Callable[[str], int]:
    """A whole number in a range, both ends included."""

    def read(given: str) -> int:
        if not given.isascii() or not given.isdigit() or not least <= int(given) <= most:
            raise ValueError(f"must be a whole number from {least} to {most}")
        return int(given)

    return read


def fraction(least: float, most: float) -> Callable[[str], float]:
    """A number in a range, both ends included."""

    def read(given: str) -> float:
        try:
            number = float(given)
        except ValueError:
            number = float("nan")
        if not least <= number <= most:
            raise ValueError(f"must be a number from {least:g} to {most:g}")
        return number

    return read


def choice(*names: str) -> Callable[[str], str]:
    """One of some words."""

    def read(given: str) -> str:
        if given not in names:
            raise ValueError(f"must be one of {', '.join(names)}")
        return given

    return read


def yes_or_no(given: str) -> bool:
    """What a switch says where it needs a value: in a file or in the environment."""
    words = {"true": True, "1": True, "yes": True, "false": False, "0": False, "no": False}
    if given.lower() not in words:
        raise ValueError("must be true or false")
    return words[given.lower()]
