"""Prints the rounds of a kill check as one table, or one JSON document."""

from __future__ import annotations

import msgspec

from kvd.replay.killcheck import KillReport
from kvd.replay.report import console, narrow_table


def as_json(report: KillReport) -> str:
    """Return the report as one JSON document."""
    document = {
        **msgspec.to_builtins(report),
        "lost": report.lost,
        "wrong_bytes": report.wrong_bytes,
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def show(report: KillReport, source: str) -> None:
    """Print the report as one table."""
    table = narrow_table(
        title=f"{source}: kill -9 at random moments, seed {report.seed}",
        caption="confirmed durable before = found + evicted since + lost",
    )
    for heading in (
        "round", "ran s", "requests", "reopen s", "confirmed", "found", "evicted", "lost",
        "wrong bytes",
    ):  # fmt: skip
        table.add_column(heading, justify="right")
    for round_ in report.rounds:
        mark = "+" if round_.killed_opening else ""
        last = round_ is report.rounds[-1]
        table.add_row(
            "stop" if last else f"{round_.number}{mark}",
            f"{round_.ran_s:.2f}",
            f"{round_.requests:,}",
            f"{round_.reopen_s:.2f}",
            f"{round_.confirmed:,}",
            f"{round_.found:,}",
            f"{round_.evicted:,}",
            f"{round_.lost:,}",
            f"{round_.wrong_bytes:,}",
        )
    table.add_section()
    total = [f"{report.lost:,}", f"{report.wrong_bytes:,}"]
    table.add_row("all", "", "", "", "", "", "", *total)
    output = console()
    output.print(table)
    output.print("+: killed once more while it was opening; stop: after a clean stop")
