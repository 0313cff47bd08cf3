"""Distributions as an SVG: enough for a page of documentation, too little for a library of plots to be worth it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

WIDTH, HEIGHT, LEFT, TOP, LEGEND_ROW = 720, 300, 50, 20, 18
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#9a6700", "#8250df", "#0a7d8c", "#bc4c00", "#57606a")


@dataclass(frozen=True, slots=True)
class Curve:
    """Positive values whose share below each point is drawn."""

    label: str
    values: Sequence[float] = field(repr=False)
    is_dashed: bool = False


def distribution_plot(title: str, curves: Sequence[Curve]) -> str:
    """An SVG document: along x the values, logarithmic; along y the share of values that are not larger."""
    everything = [value for curve in curves for value in curve.values] or [1.0]
    low, high = math.floor(math.log10(min(everything))), math.ceil(math.log10(max(everything)))
    high = max(high, low + 1)

    def x(value: float) -> float:
        return LEFT + WIDTH * (math.log10(value) - low) / (high - low)

    def y(share: float) -> float:
        return TOP + HEIGHT * (1 - share)

    parts = [_text(LEFT + WIDTH / 2, TOP + HEIGHT + 34, title, "middle")]
    for power in range(low, high + 1):
        parts.append(_line(x(10.0**power), y(0), x(10.0**power), y(1)))
        parts.append(_text(x(10.0**power), TOP + HEIGHT + 16, f"{10.0**power:g}", "middle"))
    for percent in (0, 50, 100):
        parts.append(_line(LEFT, y(percent / 100), LEFT + WIDTH, y(percent / 100)))
        parts.append(_text(LEFT - 6, y(percent / 100) + 4, f"{percent} %", "end"))
    for index, curve in enumerate(curves):
        ordered = sorted(curve.values)
        points = [(x(value), y((rank + 1) / len(ordered))) for rank, value in enumerate(ordered)]
        row = TOP + HEIGHT + 56 + LEGEND_ROW * index
        style = f'fill="none" stroke="{COLOURS[index % len(COLOURS)]}" stroke-width="2"'
        style += ' stroke-dasharray="6 4"' if curve.is_dashed else ""
        for path in (points, [(LEFT, row - 4), (LEFT + 30, row - 4)]):
            parts.append(f'<polyline {style} points="{" ".join(f"{px:.1f},{py:.1f}" for px, py in path)}"/>')
        parts.append(_text(LEFT + 38, row, curve.label, "start"))
    size = f'width="{LEFT + WIDTH + 30}" height="{TOP + HEIGHT + 60 + LEGEND_ROW * len(curves)}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>\n"])


def _line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#d0d7de"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
