"""What one line of the daemon's speed table says, and how it is printed."""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Row:
    """One figure with its target.

    Attributes
    ----------
    ours, beside : float
        Medians of both sides, in `unit`; `beside` is 0 where nothing stands beside.
    q1, median, q3 : float
        Of the figure that the target speaks of: `figure` says what it is.
    must : float or None
        The target, an upper bound where `at_most`, else a lower one. None: told for information.
    """

    part: str
    what: str
    ours: float
    beside_what: str
    beside: float
    unit: str
    figure: str
    q1: float
    median: float
    q3: float
    must: float | None
    at_most: bool
    note: str = ""

    @property
    def met(self) -> bool | None:
        """Return whether the median keeps the target."""
        if self.must is None:
            return None
        return self.median <= self.must if self.at_most else self.median >= self.must


def make(
    part: str,
    what: str,
    ours: Sequence[float],
    unit: str,
    figure: str,
    must: float | None = None,
    *,
    beside: Sequence[float] = (),
    beside_what: str = "",
    combine: Callable[[float, float], float] | None = None,
    at_most: bool = True,
    note: str = "",
) -> Row:
    """Return a row of samples, one a round; `combine` makes the figure of each round's pair."""
    figures = list(ours)
    if combine is not None:
        figures = [combine(one, other) for one, other in zip(ours, beside, strict=True)]
    low, middle, high = quartiles(figures)
    return Row(
        part,
        what,
        statistics.median(ours),
        beside_what,
        statistics.median(beside) if beside else 0.0,
        unit,
        figure,
        low,
        middle,
        high,
        must,
        at_most,
        note,
    )


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the three quartiles, of a single value too."""
    if len(values) == 1:
        return [values[0]] * 3
    return statistics.quantiles(values, n=4, method="inclusive")


def ratio(one: float, other: float) -> float:
    """Return how many times `other` it is."""
    return one / other


def difference(one: float, other: float) -> float:
    """Return how much more than `other` it is."""
    return one - other


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` of all do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def show(rows: list[Row], as_json: bool) -> None:
    """Print one table, or one JSON document."""
    if as_json:
        found = [{**dataclasses.asdict(row), "met": row.met} for row in rows]
        sys.stdout.write(json.dumps(found, indent=2) + "\n")
        return
    table = Table(title="kvd: a real daemon beside what the machine allows, by pairs")
    headings = (
        "part",
        "what",
        "ours",
        "beside",
        "",
        "figure",
        "median",
        "quartiles",
        "target",
        "",
    )
    for heading in headings:
        right = heading in ("ours", "median", "quartiles", "target") or not heading
        table.add_column(heading, justify="right" if right else "left")
    for row in rows:
        bound = "<=" if row.at_most else ">="
        table.add_row(
            row.part,
            row.what + (f" ({row.note})" if row.note else ""),
            f"{_number(row.ours)} {row.unit}",
            row.beside_what,
            _number(row.beside) if row.beside else "",
            row.figure,
            _number(row.median),
            f"{_number(row.q1)} - {_number(row.q3)}",
            "" if row.must is None else f"{bound} {row.must:g}",
            {True: "[green]met", False: "[red]missed", None: ""}[row.met],
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.2f}"
