"""`kvd check-gpu-direct [ROOT ...]`: what transfers between files and a GPU lack here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.table import Table

from kvd.commands import arguments, running
from kvd.gpu_machine import GpuMachine, in_container, look_at_machine
from kvd.gpu_roots import GpuRoot, look_at_root

ROOTS = ("KVD_HIPFILE_ROOTS", "INFERA_KVD_HIPFILE_ROOTS")
DESCRIPTION = (
    "Say what chunk files (KVD_HIPFILE_ROOTS) need to go between disk and GPU directly, and what "
    "of it is missing here: libraries, drivers, devices, file systems. Roots are those given, or "
    "the variable's."
)
EPILOG = (
    "Exit status: 0 one of hipFile and cuFile has all it is known to need, and every root too; 1 "
    "something is missing; 2 usage. What only a transfer shows, tools/gpu_direct_trial.py shows."
)


def new_parser() -> arguments.Parser:
    """Return the parser."""
    parser = arguments.Parser(
        prog="kvd check-gpu-direct",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        usage="kvd check-gpu-direct [ROOT ...] [--json]",
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Print what is there and what is not; return 0, 1 where something is missing, 2 for usage."""
    return running.run("check-gpu-direct", argv, _check)


def _check(argv: list[str]) -> int:
    options, names = arguments.parse(new_parser(), argv)
    for name in names:
        if name.startswith("-"):
            raise arguments.UsageError(f"{name!r} is no option and no root")
    machines = look_at_machine()
    roots = [look_at_root(Path(name)) for name in names or _named_roots(os.environ)]
    ready = _is_ready(machines, roots)
    if options.json:
        running.show_json(_document(machines, roots, ready))
    else:
        _show(machines, roots, ready)
    return running.DONE if ready else running.REFUSED


def _is_ready(machines: list[GpuMachine], roots: list[GpuRoot]) -> bool:
    return any(not each.missing for each in machines) and not any(each.missing for each in roots)


def _named_roots(environment: Mapping[str, str]) -> list[str]:
    text = next((environment[each] for each in ROOTS if environment.get(each)), "")
    parts = [part.strip() for part in text.split(",")]
    return [part.partition("=")[2] if "=" in part else part for part in parts if part]


def _document(machines: list[GpuMachine], roots: list[GpuRoot], ready: bool) -> dict[str, Any]:
    return {
        "ready": ready,
        "container": in_container(),
        "libraries": [msgspec.to_builtins(each) for each in machines],
        "roots": [msgspec.to_builtins(each) for each in roots],
    }


def _show(machines: list[GpuMachine], roots: list[GpuRoot], ready: bool) -> None:
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row("container", "yes" if in_container() else "not seen")
    for each in machines:
        table.add_section()
        table.add_row(each.name, each.library or "no library")
        for name, version in each.versions.items():
            table.add_row("version", f"{name} {version}")
        for name, state in each.devices.items():
            table.add_row("device", f"{name}: {state}")
        _add_texts(table, each.missing, each.notes)
    for root in roots:
        table.add_section()
        table.add_row("root", root.path)
        if root.file_system:
            table.add_row("is on", f"{root.file_system}, {root.device_class}")
            table.add_row("O_DIRECT", root.direct)
        _add_texts(table, root.missing, root.notes)
    if not roots:
        table.add_section()
        table.add_row("root", "none named: give a directory, or KVD_HIPFILE_ROOTS")
    table.add_section()
    table.add_row("ready", "yes, as far as can be seen" if ready else "no")
    running.console().print(table)


def _add_texts(table: Table, missing: list[str], notes: list[str]) -> None:
    for text in missing:
        table.add_row("missing", text)
    for text in notes:
        table.add_row("note", text)
