"""``get`` and ``put``: one value out of a region, or into it."""

from __future__ import annotations

import argparse
import base64
import sys
from typing import Any

from tablespace.commands.failures import CANNOT, FINE, FOUND, ArgumentsError
from tablespace.commands.keys import printable
from tablespace.commands.output import Output
from tablespace.commands.regions import (
    holds_region,
    open_for_reading,
    open_for_writing,
    other_files,
)
from tablespace.errors import ValueTooLargeError
from tablespace.io.streams import read_up_to, write_file


def run_get(options: argparse.Namespace, output: Output) -> int:
    """Write a value to standard output or to a file."""
    key: bytes = options.key
    with open_for_reading(options.path) as store:
        entry = store.stat(key)
        value = None if entry is None else store.get(key)
    named = {"path": options.path, "key": key.hex(), "text": printable(key)}
    if entry is None or value is None:
        why = (
            "is absent"
            if entry is None
            else "is damaged or was removed meanwhile. Remedy: 'python -m tablespace check'"
        )
        print(f"tablespace: key hex:{key.hex()} {why}", file=sys.stderr)
        if output.as_json:
            output.give({**named, "found": False}, [])
        return FOUND
    found: dict[str, Any] = {
        **named,
        "found": True,
        "length": len(value),
        "seq": entry.seq,
        "metadata": None if entry.metadata is None else entry.metadata.hex(),
    }
    if options.output is not None and options.output != "-":
        write_file(options.output, value)
        output.give({**found, "file": options.output}, [])
    elif output.as_json:
        output.give({**found, "value_base64": base64.b64encode(value).decode("ascii")}, [])
    elif output.stream.isatty() and not options.force and not _fit_for_terminal(value):
        print(
            f"tablespace: the value of hex:{key.hex()} is binary ({len(value)} bytes) and "
            "standard output is a terminal. Remedy: -o FILE, or --force",
            file=sys.stderr,
        )
        return CANNOT
    else:
        output.stream.flush()
        output.begun = True
        output.stream.buffer.write(value)
        output.stream.buffer.flush()
    return FINE


def _fit_for_terminal(value: bytes) -> bool:
    return printable(value.replace(b"\n", b"").replace(b"\t", b"")) is not None


def run_put(options: argparse.Namespace, output: Output) -> int:
    """Store a value, durably, from standard input or a file."""
    if options.slot_bytes is not None and options.create is None:
        raise ArgumentsError(
            "--slot-bytes is of a region that --create makes. Remedy: leave it out, or add sizes "
            "to a region with tablespace.open"
        )
    others: list[str] = []
    opening: dict[str, Any] = {"on_full": "evict" if options.evict else "reject"}
    if options.create is not None and not holds_region(options.path):
        opening |= {"create": True, "max_bytes": options.create, "slot_bytes": options.slot_bytes}
        others = other_files(options.path)
    with open_for_writing(options.path, **opening) as store:
        if others:
            print(
                f"tablespace: warning: {options.path} was not empty ({', '.join(others[:3])}"
                f"{', ...' if len(others) > 3 else ''}); a region was made beside that. Remedy: "
                "none needed, or a directory of its own",
                file=sys.stderr,
            )
        limit_bytes = store.stats().slot_bytes
        value = read_up_to(options.file, limit_bytes)
        if len(value) > limit_bytes:
            # Not read to its end: it may have none.
            raise ValueTooLargeError(options.key, limit_bytes, limit_bytes, more=True)
        replaced = options.key in store
        store.put(options.key, value, metadata=options.metadata)
        entry = store.stat(options.key)
        assert entry is not None
    document = {
        "path": options.path,
        "key": options.key.hex(),
        "text": printable(options.key),
        "length": len(value),
        "container": entry.container,
        "slot": entry.slot,
        "seq": entry.seq,
        "replaced": replaced,
    }
    did = "replaced" if replaced else "stored"
    output.give(
        document,
        [
            f"{did} hex:{options.key.hex()}: {len(value)} bytes in container "
            f"{entry.container}, slot {entry.slot}, seq {entry.seq}"
        ],
    )
    return FINE
