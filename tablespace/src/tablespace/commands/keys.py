"""Keys on the command line: text as it is, or ``hex:`` and hexadecimal digits."""

from __future__ import annotations

import argparse

from tablespace.layout import MAX_KEY_BYTES

HEX_MARK = "hex:"


def parse_bytes(text: str) -> bytes:
    """Return the bytes that an argument means.

    Raises
    ------
    argparse.ArgumentTypeError
        After ``hex:`` stands something else than pairs of hexadecimal digits.
    """
    if not text.startswith(HEX_MARK):
        return text.encode("utf-8", "surrogateescape")
    try:
        return bytes.fromhex(text[len(HEX_MARK) :])
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not hexadecimal: {error}") from error


def parse_key(text: str) -> bytes:
    """Return a key of 1 to 255 bytes.

    Raises
    ------
    argparse.ArgumentTypeError
    """
    key = parse_bytes(text)
    if not 1 <= len(key) <= MAX_KEY_BYTES:
        raise argparse.ArgumentTypeError(
            f"a key has 1 to {MAX_KEY_BYTES} bytes, this one {len(key)}"
        )
    return key


def printable(data: bytes) -> str | None:
    """Return bytes as text when it is fit for a terminal and comes back the same, else None."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if text.isprintable() and not text.startswith(HEX_MARK) else None
