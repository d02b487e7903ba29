"""What the texts of options mean: for argparse, whose own words name functions of ours."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from tablespace import parse_size


def size(text: str) -> int:
    """Bytes, or with K, M, G, T."""
    try:
        return parse_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def whole(text: str) -> int:
    """A whole number."""
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a whole number, not {text!r}") from None


def count(text: str) -> int:
    """A whole number, at least 1."""
    number = whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


def at_least_0(text: str) -> int:
    """A whole number, at least 0."""
    number = whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"must not be negative, not {number}")
    return number


def positive(text: str) -> float:
    """A number greater than 0, and no endless one."""
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number, not {text!r}") from None
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"must be greater than 0, not {text}")
    return number


def directory(text: str) -> Path:
    """A directory that is there."""
    if not os.path.isdir(text):
        raise argparse.ArgumentTypeError(f"{text} is no directory; create it, or name another")
    return Path(text)
