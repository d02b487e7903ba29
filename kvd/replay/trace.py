"""Reads request traces in the Mooncake JSONL format, one typed record a line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, BinaryIO

import msgspec

TOKENS_PER_BLOCK = 512
"""Tokens one hash id stands for in this format."""

MAX_LINE_BYTES = 16 << 20
"""Longest line accepted; a request of a million blocks needs about 10 MB."""

MAX_HASH_ID = (1 << 64) - 1
"""Largest hash id: keys and contents are derived from its 64 bits."""

Count = Annotated[int, msgspec.Meta(ge=0)]


class TraceError(Exception):
    """Reports a trace that can't be used, with file, line number and remedy in its text."""


class Request(msgspec.Struct, frozen=True):
    """One request of a trace.

    Parameters
    ----------
    timestamp : float
        Arrival, in milliseconds since the trace began.
    input_length, output_length : int
        Tokens of the prompt and of the answer.
    hash_ids : list of int
        One id per block of 512 prompt tokens, leading block first. Equal ids stand for equal
        blocks behind equal prefixes.

    Notes
    -----
    Fields beyond these four are ignored: later editions of the format add some.
    """

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Count
    output_length: Count
    hash_ids: list[Count]


def read_trace(path: str | os.PathLike[str], limit: int | None = None) -> Iterator[Request]:
    """Yield the requests of a trace file in order.

    Parameters
    ----------
    path : str or os.PathLike
        A JSONL file; empty lines are skipped.
    limit : int, optional
        Stop after this many requests.

    Raises
    ------
    TraceError
        When the file can't be opened, holds no request, or a line is not a valid record; the
        text names the file, the line and what to do.
    """
    name = os.fspath(path)
    with _open(name) as file:
        yield from _read_lines(file, name, limit)


def _open(name: str) -> BinaryIO:
    try:
        return open(name, "rb")
    except OSError as error:
        raise TraceError(f"{name}: {error.strerror}; name a readable JSONL trace") from error


def _read_lines(file: BinaryIO, name: str, limit: int | None) -> Iterator[Request]:
    decoder = msgspec.json.Decoder(Request)
    found = 0
    number = 0
    while limit is None or found < limit:
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            break
        number += 1
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(
                f"{name}:{number}: line longer than {MAX_LINE_BYTES} bytes; the format is one "
                "JSON object a line, so split the file into lines"
            )
        if line.isspace():
            continue
        yield _decode(decoder, line, f"{name}:{number}")
        found += 1
    if found == 0 and limit != 0:
        raise TraceError(f"{name}: holds no request; name a JSONL trace with one request a line")


def _decode(decoder: msgspec.json.Decoder[Request], line: bytes, place: str) -> Request:
    try:
        request = decoder.decode(line)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise TraceError(
            f"{place}: {error}; each line must be a JSON object with timestamp, input_length, "
            "output_length and hash_ids (a list of integers >= 0): repair or remove this line"
        ) from error
    if request.hash_ids and max(request.hash_ids) > MAX_HASH_ID:
        raise TraceError(
            f"{place}: hash id {max(request.hash_ids)} does not fit 64 bits; renumber the ids"
        )
    return request
