"""Index files of JSON that another program wrote or rewrote: a typed error, soon, by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tablespace._core.line_codec import seal

import tablespace

NAMES = ["region.json", "index.log", "index.snapshot.json"]


def sealed(line: bytes) -> bytes:
    """Return a line's members, changed, under a checksum that fits."""
    return seal(line[: line.rindex(b',"line"')])[:-1]


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "byte order mark": lambda line: b"\xef\xbb\xbf" + line,
    "carriage returns": lambda line: line + b"\r",
    "blanks": lambda line: line.replace(b":", b": "),
    "NaN": lambda line: sealed(line.replace(b'"format":1', b'"format":NaN')),
    "infinity": lambda line: sealed(line.replace(b'"format":1', b'"format":1e999')),
    "a number of many digits": lambda line: sealed(
        line.replace(b'"format":1', b'"format":' + b"9" * 3000)
    ),
    "a fraction": lambda line: sealed(line.replace(b'"format":1', b'"format":1.5')),
    "a member twice": lambda line: sealed(line.replace(b'"format":1', b'"format":1,"format":7')),
    "deep nesting": lambda line: sealed(b'{"tablespace":' + b"[" * 3500 + b',"line":""}'),
    "deep nesting of another member": lambda line: sealed(
        line.replace(b'"format":1', b'"format":1,"more":' + b'{"a":' * 600 + b"1" + b"}" * 600)
    ),
    "NUL bytes": lambda line: bytes(len(line)),
    "UTF-16": lambda line: line.decode().encode("utf-16"),
    "not UTF-8": lambda line: sealed(line.replace(b'"region":"', b'"region":"\xff\xfe')),
    "half a surrogate": lambda line: sealed(line.replace(b'"region":"', b'"region":"\\ud800')),
    "an array": lambda line: b"[" + line + b"]",
    "a word": lambda line: b"true",
    "nothing": lambda line: b"",
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_header_rewritten_by_another_program_is_refused_by_the_files_name(
    tmp_path: Path, name: str, change: str
) -> None:
    """Bytes that are no text stopped the start with the decoder's own error, whether or not there
    was a good copy."""
    region = tmp_path / "region"
    with tablespace.open(region, max_bytes="256K", slot_bytes="4K") as store:
        store.put(b"k", b"v")
    path = region / name
    first, newline, rest = path.read_bytes().partition(b"\n")
    body = CHANGES[change](first.rstrip(b" "))
    if name == "region.json":
        # Identity and holder are at fixed places.
        body = body.ljust(4095)
        rest = rest[-4096:]
    path.write_bytes(body[:4095] if name == "region.json" else body)
    with open(path, "ab") as file:
        file.write(newline + rest)
    started = time.monotonic()
    for mode in ("strict", "salvage", "empty"):
        try:
            tablespace.open(region, recover=mode).close()
        except (tablespace.CorruptionError, tablespace.FormatVersionError) as error:
            assert name in str(error)
            assert mode != "empty" or isinstance(error, tablespace.FormatVersionError)
            if mode == "strict":
                continue
        else:
            # The snapshot has a copy, and a salvage takes the identity from the journal.
            assert mode != "strict" or name == "index.snapshot.json"
    assert time.monotonic() - started < 20


def test_a_file_that_grew_by_gigabytes_is_refused_without_reading_it(tmp_path: Path) -> None:
    region = tmp_path / "region"
    with tablespace.open(region, max_bytes="256K", slot_bytes="4K") as store:
        store.put(b"k", b"v")
    with open(region / "region.json", "r+b") as file:
        file.truncate(1 << 40)
    with tablespace.open(region) as store:
        assert store[b"k"] == b"v"
