"""`kvd status`: how full the long tier is, and how it fares."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group
from rich.table import Column, Table

from kvd import protocol, stopped_region
from kvd.commands import arguments, running
from kvd.results import Status
from tablespace import format_size


def main(argv: Sequence[str] | None = None) -> int:
    """Print the status; return 0, 1 when no daemon answers, 2 for a path without a region."""
    return running.run("status", argv, _status)


def _status(argv: list[str]) -> int:
    parser = arguments.new_parser("status", __doc__)
    options, names = arguments.parse(parser, argv)
    if names:
        parser.error(f"{names[0]!r} is no option")
    status = of(options.socket, arguments.directories(options))
    if options.json:
        running.show_json(status)
    else:
        running.console().print(table(status))
    return running.DONE


def of(socket: str | None, directories: Sequence[Path]) -> Status:
    """Return the status of the daemon on a socket, or of stopped regions."""
    if not directories:
        return running.ask(socket, protocol.StatusRequest(), protocol.StatusReply, 60.0).status
    try:
        return stopped_region.status(directories)
    except stopped_region.NoRegionError as error:
        raise running.UnknownError(str(error)) from error


def counted(socket: str | None, directories: Sequence[Path]) -> Status:
    """Return the same where counters are asked for: a daemon's own alone knows them.

    Raises
    ------
    RefusedByAdminError
        A daemon has one of the directories open; it is named.
    """
    status = of(socket, directories)
    for each in status.health:
        if each.state == "in use":
            raise running.RefusedByAdminError(f"{each.path} is in use: {each.detail}")
    return status


def table(status: Status) -> Group:
    """Return the status for people."""
    summary = Table(title=f"kvd {status.version}, {status.state}", show_header=False)
    summary.add_column(no_wrap=True)
    summary.add_column(overflow="fold")
    for name, value in _rows(status):
        summary.add_row(name, value)
    namespaces = Table(
        Column("namespace", overflow="fold"), "entries", "bytes", "values", "quota", "rejected"
    )
    for name, use in status.namespaces.items():
        quota = status.quotas.get(name)
        namespaces.add_row(
            name,
            str(use.entries),
            format_size(use.bytes),
            format_size(status.per_namespace_value_bytes.get(name, 0)),
            "-" if quota is None else format_size(quota),
            str(status.rejected_by_namespace.get(name, 0)),
        )
    tiers = Table("tier", "size", "used", "entries", "hits", "misses", "read p50 us", "p99 us")
    for name, tier in status.tiers.items():
        tiers.add_row(
            name,
            format_size(tier.max_bytes) if tier.max_bytes else "-",
            format_size(tier.used_bytes),
            str(tier.entries),
            str(tier.hits),
            str(tier.misses),
            str(tier.latency.p50_us) if tier.latency.samples else "-",
            str(tier.latency.p99_us) if tier.latency.samples else "-",
        )
    return Group(summary, tiers, namespaces)


def _rows(status: Status) -> list[tuple[str, str]]:
    if "long" in status.tiers:
        rows = _long_rows(status)
    else:
        rows = [
            ("long tier", "none; --long-path DIR adds one"),
            ("dropped", str(status.dropped)),
        ]
    return rows + [("note", note) for note in status.notes]


def _long_rows(status: Status) -> list[tuple[str, str]]:
    pressure = ", above the watermark" if status.soft_pressure else ""
    chosen = status.choices
    rows = [
        (
            "used",
            f"{format_size(status.used_bytes)} of {format_size(status.max_bytes)} "
            f"({status.usage_fraction:.1%}){pressure}",
        ),
        ("free", format_size(status.free_bytes)),
        ("values", format_size(status.value_bytes)),
        (
            "on disk",
            f"{format_size(status.allocated_bytes)}, the index in it at most "
            f"{format_size(status.index_bound_bytes)}",
        ),
        ("evictions", f"{status.evictions}, {format_size(status.reclaimed_bytes)} reclaimed"),
        ("rejected writes", str(status.rejected_writes)),
        ("dropped", str(status.dropped)),
        (
            "temporary files",
            f"{status.tmp_files}, {format_size(status.tmp_files_bytes)}",
        ),
        (
            "written",
            f"{status.written_blocks} blocks, {format_size(status.written_bytes)}; never read "
            f"{status.written_never_read_blocks}, {format_size(status.written_never_read_bytes)}",
        ),
        (
            "chosen",
            f"io {chosen.io_mode} by {chosen.io_engine}, eviction {chosen.evict_policy or '-'}, "
            f"recovery {chosen.recover or '-'}",
        ),
        (
            "recovered",
            f"{chosen.recovered_entries} entries from {chosen.recovery_source or '-'} in "
            f"{chosen.recovery_seconds:.3f} s",
        ),
    ]
    rows += [("path", f"{each.path}: {each.state} {each.detail}") for each in status.health]
    return rows + [("choice", reason) for reason in chosen.reasons]
