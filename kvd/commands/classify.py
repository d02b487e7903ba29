"""`kvd classify PATH`: what storage a path is on, and how a long tier there would be reached."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.table import Table

from kvd.commands import arguments, running
from tablespace import classify


def main(argv: Sequence[str] | None = None) -> int:
    """Print what kind of storage it is; return 0, 2 for usage."""
    return running.run("classify", argv, _classify)


def _classify(argv: list[str]) -> int:
    parser = arguments.Parser(
        prog="kvd classify",
        description=__doc__,
        allow_abbrev=False,
        usage="kvd classify PATH [--json]",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options, paths = arguments.parse(parser, argv)
    if len(paths) != 1:
        what = f", not {', '.join(map(repr, paths))}" if paths else ""
        parser.error(f"name one path{what}")
    found = dataclasses.asdict(classify(paths[0]))
    if options.json:
        running.show_json(found)
        return running.DONE
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in found.items():
        if name == "chain":
            for layer in value:
                kind = layer["device_class"] or "-"
                table.add_row("through", f"{layer['name']}: {kind} ({layer['why']})")
        elif isinstance(value, list):
            for each in value:
                table.add_row(name.removesuffix("s"), each)
        else:
            table.add_row(name, str(value))
    running.console().print(table)
    return running.DONE
