"""`prism-bench placement`: the router's placement, simulated."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from prism_server.bench.arguments import positive
from prism_server.bench.placement_report import json_report, markdown_table, svg_plot
from prism_server.bench.placement_simulation import GOAL_PODS, PRISM, Cell, Plan, simulate
from prism_server.bench.report import write_json
from prism_server.cli_support import ArgumentParser
from prism_server.errors import StartupError

MISSED_EXIT_CODE = 1

PLACEMENT = """Send simulated requests through the router's own placement code and through the usual others: 2, 4, 16
and 64 pods, popularity by Zipf 0.6, 1.0, 1.4. Prints hit rates, and the busiest pod's work and requests over the mean.
Exit code 1 if Prism misses its goals with four pods."""


def run_placement(argv: Sequence[str]) -> int:
    """The subcommand. No server, no GPU, one core."""
    default = Plan()
    parser = ArgumentParser("prism-bench placement", PLACEMENT)
    parser.add_argument(
        "--requests", type=positive, default=default.num_requests, metavar="N", help="in all [default: %(default)s]"
    )
    parser.add_argument("--seed", type=int, default=default.seed, metavar="N", help="[default: %(default)s]")
    parser.add_argument(
        "--routers", type=positive, default=default.num_routers, metavar="N", help="[default: %(default)s]"
    )
    parser.add_argument(
        "--pods", type=positive, action="append", metavar="N", help="repeatable [default: 2, 4, 16 and 64]"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every number")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them, as SVG")
    arguments = parser.parse_strictly(argv)
    plan = Plan(
        arguments.requests, arguments.seed, tuple(arguments.pods or default.pods), num_routers=arguments.routers
    )
    cells = simulate(plan, _tell)
    print(markdown_table(cells))
    if arguments.json:
        write_json(arguments.json, json_report(plan, cells))
    if arguments.plot:
        try:
            arguments.plot.write_text(svg_plot(cells), encoding="utf-8")
        except OSError as error:
            raise StartupError(f"--plot {arguments.plot}: {error.strerror}") from None
    missed = [(cell, miss) for cell in cells if cell.num_pods == GOAL_PODS for miss in cell.misses()]
    for cell, miss in missed:
        print(f"prism-bench: {cell.num_pods} pods, Zipf {cell.exponent}: {miss}", file=sys.stderr)
    return MISSED_EXIT_CODE if missed else 0


def _tell(cell: Cell) -> None:
    seconds = sum(cell.wall_s.values())
    print(
        f"{cell.num_pods} pods, Zipf {cell.exponent}: {cell.hit_gap_points:.2f} points behind one pod, "
        f"{cell.wall_s[PRISM]:.0f} of {seconds:.0f} s",
        file=sys.stderr,
        flush=True,
    )
