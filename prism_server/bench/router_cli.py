"""`prism-bench router`: what the router costs, beside direct calls to the same pod."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from prism_server.bench.arguments import positive, positive_number
from prism_server.bench.report import environment, write_json
from prism_server.bench.router_latency import RouterPlan, measure_router
from prism_server.cli_support import ArgumentParser

FAILED_EXIT_CODE = 1

ROUTER = """Start a stub pod and a router, and measure what the router adds to a request, the gaps of many open streams,
and its CPU time, beside direct calls to the pod. Exit code 1 if a call failed or a stream did not come to its end."""


def run_router(argv: Sequence[str]) -> int:
    """The subcommand. No GPU; a process each for client, router and pod."""
    plan, file = _parsed(argv)
    try:
        costs = measure_router(plan)
    except OSError as error:
        print(f"prism-bench: {error}", file=sys.stderr)
        return FAILED_EXIT_CODE
    print(costs.table())
    if file:
        kept = {
            "measurement": "router",
            "command": shlex.join(["prism-bench", "router", *argv]),
            "environment": environment(),
            "plan": asdict(plan),
        }
        write_json(file, kept | asdict(costs))
    cut_off = [streams for streams in costs.streams if streams.num_finished < streams.num_opened]
    for streams in cut_off:
        print(f"prism-bench: {streams.name}: {streams.num_finished} of {streams.num_opened} ended", file=sys.stderr)
    return FAILED_EXIT_CODE if cut_off else 0


def _parsed(argv: Sequence[str]) -> tuple[RouterPlan, Path | None]:
    default, parser = RouterPlan(), ArgumentParser("prism-bench router", ROUTER)
    parser.add_argument(
        "--rounds", type=positive, default=default.rounds, metavar="N", help="calls of each kind [default: %(default)s]"
    )
    parser.add_argument(
        "--streams", type=positive, default=default.num_streams, metavar="N", help="open at once [default: %(default)s]"
    )
    parser.add_argument(
        "--tokens-per-s",
        type=positive_number,
        default=default.tokens_per_s,
        metavar="X",
        help="of each stream [default: %(default)s]",
    )
    parser.add_argument(
        "--stream-s",
        type=positive_number,
        default=default.stream_s,
        metavar="X",
        help="seconds that a stream lasts [default: %(default)s]",
    )
    parser.add_argument("--seed", type=int, default=default.seed, metavar="N", help="[default: %(default)s]")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep every number")
    given = parser.parse_strictly(argv)
    return RouterPlan(given.rounds, given.streams, given.tokens_per_s, given.stream_s, given.seed), given.json
