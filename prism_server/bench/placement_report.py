"""The simulation's results: a table in Markdown, a plot as SVG, the numbers as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from html import escape
from typing import Any

from prism_server.bench.placement_policies import OTHERS
from prism_server.bench.placement_simulation import PRISM, Cell, Outcome, Plan
from prism_server.bench.report import environment

COLOURS = {
    PRISM: "#0b6e4f",
    "one pod": "#222222",
    "consistent hash": "#c8553d",
    "least loaded": "#588b8b",
    "text prefix": "#8f6fb0",
    "random": "#a0a0a0",
    "round robin": "#d0a000",
}
PANEL_WIDTH, PANEL_HEIGHT, MARGIN = 250, 190, 56
BUSIEST_SHOWN = 4.0


def markdown_table(cells: Sequence[Cell]) -> str:
    """A row for every cell: hit rates, then the busiest pods' work and requests over the mean."""
    names = (PRISM, *OTHERS)
    lines = [
        "| pods | Zipf | one pod with all memory | " + " | ".join(names) + " |",
        "|---" * (3 + len(names)) + "|",
    ]
    for cell in cells:
        columns = [_cell_text(cell.outcomes[name]) for name in names]
        lines.append(f"| {cell.num_pods} | {cell.exponent} | {cell.one_pod_hit_rate:.1%} | {' | '.join(columns)} |")
    return "\n".join(lines)


def _cell_text(outcome: Outcome) -> str:
    return f"{outcome.hit_rate:.1%}, {outcome.busiest_work:.2f} / {outcome.busiest_requests:.2f}"


def json_report(plan: Plan, cells: Sequence[Cell]) -> dict[str, Any]:
    """Everything, with where it was made."""
    return {"plan": asdict(plan), "environment": environment(), "cells": [asdict(cell) for cell in cells]}


def svg_plot(cells: Sequence[Cell]) -> str:
    """Above, hit rates; below, the busiest pod's work over the mean; a column of panels for every exponent."""
    exponents = sorted({cell.exponent for cell in cells})
    width = MARGIN + len(exponents) * (PANEL_WIDTH + 24)
    height = 2 * (PANEL_HEIGHT + MARGIN) + 64
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif"'
        ' font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for column, exponent in enumerate(exponents):
        chosen = [cell for cell in cells if cell.exponent == exponent]
        left = MARGIN + column * (PANEL_WIDTH + 24)
        hits = {name: [cell.outcomes[name].hit_rate for cell in chosen] for name in (PRISM, *OTHERS)}
        hits["one pod"] = [cell.one_pod_hit_rate for cell in chosen]
        work = {name: [cell.outcomes[name].busiest_work for cell in chosen] for name in (PRISM, *OTHERS)}
        pods = [cell.num_pods for cell in chosen]
        parts += _panel(f"hit rate, Zipf {exponent}", left, 28, pods, hits, (0.0, 1.0))
        top = 28 + PANEL_HEIGHT + MARGIN
        parts += _panel(f"busiest pod / mean, Zipf {exponent}", left, top, pods, work, (1.0, BUSIEST_SHOWN))
    parts += _legend(height - 24)
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    title: str,
    left: float,
    top: float,
    pods: Sequence[int],
    lines: dict[str, list[float]],
    span: tuple[float, float],
) -> Iterator[str]:
    low, high = span
    step = PANEL_WIDTH / max(1, len(pods) - 1)

    def y(value: float) -> float:
        return top + PANEL_HEIGHT * (1 - (min(max(value, low), high) - low) / (high - low))

    yield f'<text x="{left}" y="{top - 8}" font-weight="bold">{escape(title)}</text>'
    for tick in range(5):
        value = low + (high - low) * tick / 4
        yield f'<line x1="{left}" x2="{left + PANEL_WIDTH}" y1="{y(value):.1f}" y2="{y(value):.1f}" stroke="#e4e4e4"/>'
        yield f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.2f}</text>'
    for index, count in enumerate(pods):
        x = left + index * step
        yield f'<text x="{x:.1f}" y="{top + PANEL_HEIGHT + 16}" text-anchor="middle">{count} pods</text>'
    for name, values in lines.items():
        points = " ".join(f"{left + index * step:.1f},{y(value):.1f}" for index, value in enumerate(values))
        thick, dashes = (3, "") if name == PRISM else (1.6, ' stroke-dasharray="6 4"' if name == "one pod" else "")
        yield f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="{thick}"{dashes}/>'


def _legend(y: float) -> Iterator[str]:
    for index, (name, colour) in enumerate(COLOURS.items()):
        x = MARGIN + index * 116
        yield f'<line x1="{x}" x2="{x + 18}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" stroke-width="3"/>'
        yield f'<text x="{x + 23}" y="{y}">{escape(name)}</text>'
