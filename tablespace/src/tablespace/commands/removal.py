"""``rm``: delete keys, or every key that begins with a prefix."""

from __future__ import annotations

import argparse

from tablespace.commands.failures import FINE, FOUND, ArgumentsError
from tablespace.commands.output import Output
from tablespace.commands.progress import Progress
from tablespace.commands.regions import open_for_writing


def run_rm(options: argparse.Namespace, output: Output) -> int:
    """Delete, durably; keys that are absent are named."""
    keys: list[bytes] = list(dict.fromkeys(options.keys))
    if (options.prefix is None) == (not keys):
        raise ArgumentsError("name keys or --prefix, one of the two. Remedy: rm PATH KEY...")
    if options.prefix == b"" and not options.yes:
        raise ArgumentsError("an empty --prefix removes every key. Remedy: say --yes too")
    absent: list[str] = []
    with open_for_writing(options.path) as store:
        if keys:
            there = store.contains_many(keys)
            absent = [
                f"hex:{key.hex()}" for key, found in zip(keys, there, strict=True) if not found
            ]
            removed = store.delete_many(keys)
        else:
            with Progress("removing"):
                removed = store.clear(options.prefix)
        left = len(store)
    document = {
        "path": options.path,
        "removed": removed,
        "absent": [name.removeprefix("hex:") for name in absent],
        "left": left,
    }
    lines = [f"absent {name}" for name in absent]
    output.give(document, [*lines, f"removed {removed}, {left} left"])
    return FOUND if absent else FINE
