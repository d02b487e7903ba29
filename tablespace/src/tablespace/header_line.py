"""Decode the JSON lines that head and end files: hostile input, so every failure is one error."""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Line = TypeVar("Line", bound=msgspec.Struct)


def decode_line(line: bytes, kind: type[Line]) -> Line:
    """Decode one line into a struct.

    Raises
    ------
    ValueError
        For anything that is not such a line: no JSON, other members, numbers out of range, text
        that is not UTF-8, nesting without end.
    """
    try:
        return msgspec.json.decode(line, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error
