"""Interleaved comparisons: the disk drifts by 2x within minutes, only ratios mean anything."""

from __future__ import annotations

import json
import random
import statistics
import sys
from collections.abc import Callable

from rich.console import Console
from rich.progress import track
from rich.table import Table

Row = dict[str, float | str]


def compare(
    pairs: int, base_name: str, base: Callable[[], float], variants: dict[str, Callable[[], float]]
) -> list[Row]:
    """Run base and variants in random order within each round.

    Parameters
    ----------
    base, variants : callable
        Return operations a second.

    Returns
    -------
    list of dict
        One a variant: its median speed, the base's, and the quartiles of ratios within rounds.
    """
    ratios: dict[str, list[float]] = {name: [] for name in variants}
    speeds: dict[str, list[float]] = {name: [] for name in variants}
    bases = []
    console = Console(stderr=True)
    for _ in track(range(pairs), base_name, console=console, disable=not console.is_terminal):
        runs: list[tuple[str, Callable[[], float]]] = [("", base), *variants.items()]
        random.shuffle(runs)
        found = {name: run() for name, run in runs}
        bases.append(found[""])
        for name in variants:
            speeds[name].append(found[name])
            ratios[name].append(found[name] / found[""])
    rows: list[Row] = []
    for name, values in ratios.items():
        low, middle, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        rows.append(
            {
                "what": name,
                "per_s": statistics.median(speeds[name]),
                "base": base_name,
                "base_per_s": statistics.median(bases),
                "ratio_q1": low,
                "ratio": middle,
                "ratio_q3": high,
            }
        )
    return rows


def show(title: str, rows: list[Row], as_json: bool) -> None:
    """Print one table, or one JSON document."""
    if as_json:
        json.dump(rows, sys.stdout)
        sys.stdout.write("\n")
        return
    table = Table(title=title)
    for heading in ("what", "per second", "beside", "per second", "ratio", "quartiles"):
        table.add_column(heading, justify="left" if heading in ("what", "beside") else "right")
    for row in rows:
        table.add_row(
            str(row["what"]),
            f"{row['per_s']:,.0f}",
            str(row["base"]),
            f"{row['base_per_s']:,.0f}",
            f"{row['ratio']:.2f}",
            f"{row['ratio_q1']:.2f} - {row['ratio_q3']:.2f}",
        )
    Console().print(table)
