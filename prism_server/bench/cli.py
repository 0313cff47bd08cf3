"""`prism-bench`: measurements of servers, kernels and the router, each a subcommand."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from prism_server.bench.accuracy import DEFAULT_VARIANTS, VARIANTS, AccuracyPlan, measure, report
from prism_server.bench.arguments import api_key, group_option, positive
from prism_server.bench.client import AnswerFailed
from prism_server.bench.draw import draw_to
from prism_server.bench.gate import run_gate
from prism_server.bench.placement_cli import run_placement
from prism_server.bench.questions import PICTURE_LAYOUTS
from prism_server.bench.report import write_json
from prism_server.bench.router_cli import run_router
from prism_server.bench.serve_cli import run_serve
from prism_server.cli_support import ArgumentParser, console_script

FAILED_EXIT_CODE = 1

EPILOG = """commands:
  accuracy   ask the bundled model through real servers and count right answers
  serve      times and rates of a server under repeated media
  kernels    times of the GPU kernels beside their twins
  router     what the router adds to requests and streams, in front of a stub pod
  placement  the router's placement of requests, simulated
  gate       how late big bodies and many streams make an engine's steps
  draw       write pictures of the kind that the bundled model reads, with questions

examples:
  prism-bench accuracy                                   a server of each default variant, one after the other
  prism-bench accuracy --reference --json accuracy.json  the same, beside Hugging Face's answers, kept in a file
  prism-bench accuracy --base-url http://localhost:8000  a server that runs already
  prism-bench serve --set model.path=DIR --json s.json   start a server, time it, run phases a to d
  prism-bench serve --base-url URL --phase load --rate 4 Poisson arrivals at any OpenAI-compatible server
  prism-bench kernels                                    on a machine with an NVIDIA GPU
  prism-bench router --streams 500                       on one machine, without a GPU
  prism-bench placement --requests 100000 --pods 4       a tenth of the requests, four pods only
  prism-bench draw pages-8 pages                         eight invoice pages as PNG files

prism-bench COMMAND --help has the options.
exit code: 0; 1 when runs differ by more than a point, a request or a kernel failed, or placement misses its goals;
2 when an argument is wrong"""

ACCURACY = """Ask the bundled model questions about pictures of all its layouts, through HTTP, and count the
answers that are right to the character, for servers that must not differ. Exit code 1 if two of them, or one of them
and the reference, lie more than one percentage point apart."""


@console_script("prism-bench")
def main(argv: Sequence[str]) -> int:
    commands: dict[str, Callable[[Sequence[str]], int]] = {
        "accuracy": run_accuracy,
        "serve": run_serve,
        "kernels": run_kernels,
        "router": run_router,
        "placement": run_placement,
        "gate": run_gate,
        "draw": run_draw,
    }
    if not argv or argv[0] not in commands:
        parser = ArgumentParser("prism-bench", "Measure Prism: servers through HTTP, kernels, the router.", EPILOG)
        parser.add_argument("command", choices=commands, metavar="COMMAND")
        parser.parse_args(argv)  # explains, or says what is wrong
    try:
        return commands[argv[0]](argv[1:])
    except* AnswerFailed as failed:
        print(f"prism-bench: {failed.exceptions[0]}", file=sys.stderr)
    return FAILED_EXIT_CODE


def run_accuracy(argv: Sequence[str]) -> int:
    arguments = _accuracy_parser().parse_strictly(argv)
    plan = AccuracyPlan(
        num_questions=arguments.questions,
        seed=arguments.seed,
        clips=arguments.clips,
        num_clients=arguments.clients,
        variants=arguments.variant or DEFAULT_VARIANTS,
        with_reference=arguments.reference,
        base_url=arguments.base_url,
        api_key=api_key(arguments.api_key_file),
        server_options=dict(arguments.set),
    )
    scores = measure(plan)
    print(scores.tables())
    if arguments.json:
        write_json(arguments.json, report(plan, scores))
    disagreements = scores.disagreements()
    for line in disagreements:
        print(f"prism-bench: {line}", file=sys.stderr)
    return FAILED_EXIT_CODE if disagreements else 0


def run_kernels(argv: Sequence[str]) -> int:
    from prism_server.bench import kernels  # imports torch, which the other commands do without

    return kernels.run_kernels(argv)


def run_draw(argv: Sequence[str]) -> int:
    parser = ArgumentParser("prism-bench draw", "Write the pictures of a layout, and questions with their answers.")
    layouts = {layout.name: layout for layout in PICTURE_LAYOUTS}
    parser.add_argument("layout", choices=layouts, metavar="LAYOUT", help=", ".join(layouts))
    parser.add_argument("directory", type=Path, metavar="DIRECTORY", help="is made if it is not there")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="other seeds give other pictures [default: 0]")
    arguments = parser.parse_strictly(argv)
    for path in draw_to(arguments.directory, layouts[arguments.layout], arguments.seed):
        print(path)
    return 0


def _accuracy_parser() -> ArgumentParser:
    default = AccuracyPlan()
    parser = ArgumentParser("prism-bench accuracy", ACCURACY)
    parser.add_argument(
        "--questions", type=positive, default=default.num_questions, metavar="N", help="[default: %(default)s]"
    )
    parser.add_argument("--seed", type=int, default=default.seed, metavar="N", help="[default: %(default)s]")
    parser.add_argument("--clips", action="store_true", help="ask about clips instead of pictures, pages and text")
    parser.add_argument(
        "--clients",
        type=positive,
        default=default.num_clients,
        metavar="N",
        help="questions under way at once [default: %(default)s]",
    )
    parser.add_argument(
        "--variant",
        action="append",
        choices=VARIANTS,
        metavar="NAME",
        help=f"repeatable; one of {', '.join(VARIANTS)} [default: {', '.join(DEFAULT_VARIANTS)}]",
    )
    parser.add_argument("--reference", action="store_true", help="ask Hugging Face's generate() too")
    parser.add_argument("--json", type=Path, metavar="FILE", help="keep the counts and the wrong answers")
    parser.add_argument("--base-url", metavar="URL", help="ask this server instead; it must serve the bundled model")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="with the key for --base-url")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        type=group_option,
        metavar="GROUP.OPTION=VALUE",
        help="an option of prism-serve for every server that is started; repeatable",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main(None))
