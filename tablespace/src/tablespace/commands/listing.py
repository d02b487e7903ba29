"""``ls``: which keys a region has."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from tablespace.commands.failures import FINE
from tablespace.commands.keys import printable
from tablespace.commands.output import Output
from tablespace.commands.progress import Progress
from tablespace.commands.regions import open_for_reading
from tablespace.store import Store


def run_ls(options: argparse.Namespace, output: Output) -> int:
    """List keys in the order of their bytes, without reading a value."""
    with open_for_reading(options.path) as store:
        keys = sorted(key for key in store if key.startswith(options.prefix))
        shown = keys if options.limit is None else keys[: options.limit]
        head = {"path": options.path, "total": len(keys), "shown": len(shown)}
        with Progress("listing", len(shown), enabled=not output.stream.isatty()) as progress:
            rows = _rows(store, shown, progress)
            output.give_rows(head, "entries", rows, _lines(rows, shown, len(keys)))
    return FINE


def _rows(store: Store, keys: list[bytes], progress: Progress) -> Iterator[dict[str, Any]]:
    for key in keys:
        progress.done += 1
        entry = store.stat(key)
        if entry is None:
            continue  # Deleted since by the writer.
        yield {
            "key": key.hex(),
            "text": printable(key),
            "length": entry.length,
            "container": entry.container,
            "slot": entry.slot,
            "seq": entry.seq,
            "checksum": f"{entry.checksum:016x}",
            "metadata": None if entry.metadata is None else entry.metadata.hex(),
        }


def _lines(rows: Iterator[dict[str, Any]], keys: list[bytes], total: int) -> Iterator[str]:
    widest = max([len(key) for key in keys], default=0) * 2 + 4
    width = max(4, min(widest, 68))
    yield f"{'key':<{width}} {'length':>10} {'container/slot':>15} {'seq':>10}  text"
    for row in rows:
        place = f"{row['container']}/{row['slot']}"
        text = "-" if row["text"] is None else row["text"]
        key = f"hex:{row['key']}"
        yield f"{key:<{width}} {row['length']:>10} {place:>15} {row['seq']:>10}  {text}"
    left = "" if len(keys) == total else f", {total - len(keys)} more not shown"
    yield f"{len(keys)} {'key' if len(keys) == 1 else 'keys'}{left}"
