"""Draws hit ratio against capacity: as a page for a browser, or as a PNG with matplotlib."""

from __future__ import annotations

import html
import importlib
from collections.abc import Sequence
from pathlib import Path

from kvd.policy.simulation import Row

WIDTH, HEIGHT, MARGIN = 720, 420, 60
COLOURS = ("#1b6ca8", "#c8553d", "#3a7d44", "#7d5ba6")


class PlotError(Exception):
    """Reports a plot that cannot be drawn, with the remedy."""


def draw(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write the plot to a file whose name ends in .html, .svg or .png.

    Raises
    ------
    PlotError
        For another ending, or a PNG without matplotlib.
    OSError
        When the file cannot be written.
    """
    if path.suffix in (".html", ".svg"):
        svg = _svg(rows, title)
        page = f"<!doctype html><meta charset=utf-8><title>{html.escape(title)}</title>{svg}\n"
        path.write_text(page if path.suffix == ".html" else svg + "\n")
    elif path.suffix == ".png":
        _png(rows, path, title)
    else:
        raise PlotError(f"--plot {path}: the name must end in .html, .svg or .png")


def _curves(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        found.setdefault(row.policy, []).append((row.capacity_blocks, row.hit_ratio))
    return {policy: sorted(points) for policy, points in found.items()}


def _svg(rows: Sequence[Row], title: str) -> str:
    curves = _curves(rows)
    widest = max(row.capacity_blocks for row in rows)
    highest = max(0.01, *(row.hit_ratio for row in rows))

    def at(capacity: int, ratio: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * capacity / widest
        y = HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * ratio / highest
        return f"{x:.1f},{y:.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" font-family="sans-serif" font-size="13">',
        f'<text x="{MARGIN}" y="24" font-size="16">{html.escape(title)}</text>',
        f'<path d="M{at(0, highest)} L{at(0, 0)} L{at(widest, 0)}" fill="none" stroke="#444"/>',
    ]
    for tick in range(5):
        x, y = at(widest * tick // 4, highest * tick / 4).split(",")
        parts += [
            f'<text x="{x}" y="{HEIGHT - MARGIN + 20}" text-anchor="middle">'
            f"{widest * tick // 4}</text>",
            f'<text x="{MARGIN - 8}" y="{y}" text-anchor="end">{highest * tick / 4:.3f}</text>',
        ]
    parts.append(
        f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" text-anchor="middle">blocks of capacity</text>'
    )
    for number, (policy, points) in enumerate(curves.items()):
        colour = COLOURS[number % len(COLOURS)]
        line = " ".join(at(capacity, ratio) for capacity, ratio in [(0, 0.0), *points])
        parts += [
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>',
            f'<text x="{WIDTH - MARGIN + 6}" y="{MARGIN + 18 * number}" fill="{colour}">'
            f"{html.escape(policy)}</text>",
        ]
    return "".join([*parts, "</svg>"])


def _png(rows: Sequence[Row], path: Path, title: str) -> None:
    try:
        pyplot = importlib.import_module("matplotlib.pyplot")
    except ImportError as error:
        raise PlotError(
            f"--plot {path}: a PNG needs matplotlib, which is not installed; install it, or "
            "name a file that ends in .html"
        ) from error
    pyplot.switch_backend("Agg")
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for policy, points in _curves(rows).items():
        axes.plot(*zip(*points, strict=True), marker="o", label=policy)
    axes.set(title=title, xlabel="blocks of capacity", ylabel="leading hits / references")
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
