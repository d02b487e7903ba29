"""What a soak found, as a table or one JSON document."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from kvd.replay.report import console, narrow_table
from tablespace import format_size

MAX_RSS_GROWTH = 0.01
STEADY_FROM = 1 / 3
"""Share of the run after which nothing is restarted and memory has to stay as it is."""

MIN_STEADY_MINUTES = 10.0
"""A shorter steady part says how memory grew and holds nobody to it: caches still fill."""

MIN_STEADY_MINUTES_OF_DESCRIPTORS = 1.0
WINDOW = 1 / 20
MAX_DESCRIPTORS_MORE = 2
MAX_ROWS = 60


class Sample(msgspec.Struct, frozen=True):
    """One look at the daemon, `minute` after the clients were started."""

    minute: float
    life: int
    at_rest: bool
    rss_bytes: int
    anonymous_bytes: int
    threads: int
    descriptors: int
    sessions: int
    entries: int
    used_bytes: int
    usage_fraction: float


class SoakReport(msgspec.Struct, frozen=True, kw_only=True):
    """One soak, as `--json` prints it. `problems` is empty when all held."""

    seed: int
    minutes: float
    clients: int
    clients_killed: int
    restarts: list[str]
    calls: int
    stored: int
    refused: int
    hits: int
    misses: int
    leased: int
    deleted: int
    unavailable: int
    checked_bytes: int
    wrong_bytes: int
    wrong_blocks: int
    evictions: int
    blocks_written: int
    blocks_promoted: int
    checks: int
    checks_at_rest: int
    rss_bytes_before: int | None
    rss_bytes_after: int | None
    rss_growth: float | None
    anonymous_growth: float | None
    descriptors_at_rest: list[int]
    usage_fractions: list[float]
    samples: list[Sample]
    problems: list[str]


class Growth(msgspec.Struct, frozen=True):
    """Memory at the beginning and the end of the steady part: medians, so that no peak counts."""

    rss_before: int
    rss_after: int
    rss: float
    anonymous: float


def growth(samples: Sequence[Sample], minutes: float) -> Growth | None:
    """Return how the daemon's memory grew while nothing was restarted; None for too few looks."""
    begin, width = minutes * STEADY_FROM, minutes * WINDOW
    first = [each for each in samples if begin <= each.minute < begin + width]
    last = [each for each in samples if each.minute >= minutes - width]
    if not first or not last or {each.life for each in first} != {each.life for each in last}:
        return None
    rss_before = statistics.median_low(each.rss_bytes for each in first)
    rss_after = statistics.median_low(each.rss_bytes for each in last)
    private_before = statistics.median_low(each.anonymous_bytes for each in first)
    private_after = statistics.median_low(each.anonymous_bytes for each in last)
    return Growth(
        rss_before,
        rss_after,
        round(rss_after / rss_before - 1, 5),
        round(private_after / private_before - 1, 5),
    )


def steady_problems(samples: Sequence[Sample], minutes: float) -> list[str]:
    """Say whether memory or descriptors grew in the steady part of a run."""
    found: list[str] = []
    grown = growth(samples, minutes)
    steady = minutes * (1 - STEADY_FROM)
    if grown is not None and grown.rss > MAX_RSS_GROWTH and steady >= MIN_STEADY_MINUTES:
        found.append(
            f"resident memory grew by {100 * grown.rss:.2f} % in the last {steady:.0f} minutes, "
            f"from {grown.rss_before} to {grown.rss_after} bytes"
        )
    resting = [
        each.descriptors
        for each in samples
        if each.at_rest and each.minute >= minutes * STEADY_FROM
    ]
    half = len(resting) // 2
    # Threads that come to work for the first time bring descriptors of their own.
    if steady < MIN_STEADY_MINUTES_OF_DESCRIPTORS or not half:
        return found
    if max(resting[half:]) - max(resting[:half]) > MAX_DESCRIPTORS_MORE:
        found.append(f"descriptors open at rest grew: {resting}")
    return found


def as_json(report: SoakReport) -> str:
    """Return the report as one JSON document."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode()


def show(report: SoakReport) -> None:
    """Print the report as a table."""
    table = narrow_table(
        title=f"{report.minutes:g} minutes, {report.clients} clients, seed {report.seed}",
        caption="the daemon by time; *: at rest, with all accounts compared",
    )
    for heading in ("minute", "life", "RSS", "private", "fds", "sessions", "entries", "used"):
        table.add_column(heading, justify="right")
    for each in thinned(report.samples):
        table.add_row(
            f"{each.minute:.1f}{'*' if each.at_rest else ' '}",
            str(each.life),
            format_size(each.rss_bytes),
            format_size(each.anonymous_bytes),
            str(each.descriptors),
            str(each.sessions),
            f"{each.entries:,}",
            f"{100 * each.usage_fraction:.1f} %",
        )
    output = console()
    output.print(table)

    def say(line: str) -> None:
        # Whole: the terminal breaks what is too long for it, we might do it inside a number.
        output.print(line, soft_wrap=True)

    restarts = ", ".join(report.restarts) or "none"
    say(f"clients killed {report.clients_killed}, the daemon ended by: {restarts}")
    say(
        f"calls {report.calls:,}: stored {report.stored:,} (refused {report.refused:,}), "
        f"hits {report.hits:,}, misses {report.misses:,}, read under leases {report.leased:,}, "
        f"deleted {report.deleted:,}"
    )
    say(
        f"on the disk: written {report.blocks_written:,}, promoted {report.blocks_promoted:,}, "
        f"evicted {report.evictions:,}"
    )
    if report.rss_growth is not None and report.anonymous_growth is not None:
        say(
            f"resident memory in the last two thirds: {100 * report.rss_growth:+.2f} % "
            f"(private {100 * report.anonymous_growth:+.2f} %)"
        )
    say(
        f"compared {format_size(report.checked_bytes)}, accounts {report.checks} times, "
        f"at rest {report.checks_at_rest} times"
    )
    say(f"wrong bytes {report.wrong_bytes:,}")
    for problem in report.problems:
        say(f"problem: {problem}")


def thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Return those at rest if there are some, and no more than fit a screen or two."""
    chosen = [each for each in samples if each.at_rest] or list(samples)
    step = -(-len(chosen) // MAX_ROWS)
    return chosen[::step] if step else []
