"""`prism-bench serve`: options, the server if it is ours, and what is printed and kept."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from prism_server.bench.arguments import api_key, comma_list, group_option, positive, positive_number, size
from prism_server.bench.client import AnswerFailed, Client
from prism_server.bench.load_client import LoadClient
from prism_server.bench.load_shape import LoadMaker, LoadShape
from prism_server.bench.report import write_json
from prism_server.bench.serve_load import PHASES, LoadPlan, Measured, run_phases
from prism_server.bench.serve_report import Row, plot_of, report, table_of, warnings
from prism_server.bench.server_process import ServerProcess, StartProgress
from prism_server.cli_support import ArgumentParser
from prism_server.errors import StartupError

T = TypeVar("T")

FIRST_REQUEST_TOKENS = 16
"""Of a start's first request; its clock stops at the first."""

ABOUT = """Measure a server under repeated media: times to first token, cold and hot, time per token, the longest gap,
requests a second. Without --base-url, prism-serve is started, and timed from there to the first token of a request.
Exit code 1 if a request failed.

phases:
  start  nothing but the start
""" + "\n".join(f"  {name:<5}  {about}" for name, about in PHASES.items())


def run_serve(argv: Sequence[str]) -> int:
    arguments = _parser().parse_strictly(argv)
    plan = _plan(arguments)
    key = api_key(arguments.api_key_file)
    starts_s: list[float] = []
    if arguments.base_url:
        model, measured = _run(_measure(arguments.base_url, key, plan))
    else:
        for _ in range(arguments.starts - 1):
            with _started(dict(arguments.set)) as (_, start_s):
                starts_s.append(start_s)
        with _started(dict(arguments.set)) as (url, start_s):
            starts_s.append(start_s)
            model, measured = _run(_measure(url, None, plan))
    rows = [Row.of(one) for one in measured]
    if starts_s:
        print("spawn to first token, s:", ", ".join(f"{start_s:.1f}" for start_s in starts_s))
    if rows:
        print(table_of(rows))
    if arguments.json:
        command = shlex.join(["prism-bench", "serve", *argv])
        write_json(arguments.json, report(command, model, starts_s, measured))
    if arguments.plot:
        arguments.plot.write_text(plot_of(measured), encoding="utf-8")
    for line in warnings(rows):
        print(f"prism-bench: {line}", file=sys.stderr)
    return 1 if any(row.num_failed for row in rows) else 0


async def _measure(url: str, key: str | None, plan: LoadPlan) -> tuple[str, list[Measured]]:
    measured: list[Measured] = []
    async with Client(url, key) as client:
        model = await client.model_name()
    async with LoadClient(url, model, key) as load_client:
        if plan.phases:
            async for one in run_phases(load_client, plan):
                measured.append(one)
                _say(f"{one.phase}, {one.setting}: done")
    return model, measured


@contextlib.contextmanager
def _started(options: Mapping[str, str]) -> Iterator[tuple[str, float]]:
    """A server's URL, and the seconds from its spawn to the first token that it gave."""
    spawned_s = time.perf_counter()
    with ServerProcess(options, _show_start) as server:
        first_s = _run(_first_token(server.api_url))
        _say("")
        yield server.api_url, first_s - spawned_s


async def _first_token(url: str) -> float:
    """When the first token of a small request came, on `time.perf_counter`."""
    async with Client(url) as client:
        model = await client.model_name()
    async with LoadClient(url, model) as load_client:
        job = LoadMaker(LoadShape(), model).text("first", 1, FIRST_REQUEST_TOKENS)
        result = await load_client.send(job.body, job.kind)
    if result.error:
        raise AnswerFailed(result.error)
    return result.first_s


def _run(measuring: Coroutine[Any, Any, T]) -> T:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(measuring)


def _show_start(progress: StartProgress) -> None:
    _say(f"{progress.elapsed_s:.0f} s: {progress.stage}")


def _say(text: str) -> None:
    """One line that is written over, where somebody looks on."""
    if sys.stderr.isatty():
        print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)


def _plan(arguments: argparse.Namespace) -> LoadPlan:
    shape = LoadShape(
        num_groups=arguments.groups,
        num_questions=arguments.questions,
        pictures_per_group=arguments.pictures,
        picture_size=arguments.picture_size,
        output_tokens=arguments.output_tokens,
        zipf_exponent=arguments.zipf,
        seed=arguments.seed,
        extra_fields=_fields(arguments.body),
    )
    phases = arguments.phase or LoadPlan().phases
    if "start" in phases and arguments.base_url:
        raise StartupError("--phase start is for a server that prism-bench starts, not for --base-url")
    return LoadPlan(
        shape,
        phases=[phase for phase in phases if phase != "start"],
        repeats=arguments.repeats,
        concurrencies=arguments.concurrencies,
        batches=arguments.batches,
        context_words=arguments.context_words,
        decode_tokens=arguments.decode_tokens,
        num_decoders=arguments.streams,
        num_requests=arguments.requests,
        concurrency=arguments.concurrency,
        rate=arguments.rate,
    )


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as broken:
        raise StartupError(f"--body {text!r} is not JSON: {broken}") from None
    if not isinstance(fields, dict):
        raise StartupError(f"--body {text!r} must be a JSON object")
    return fields


def _parser() -> ArgumentParser:
    plan = LoadPlan()
    parser = ArgumentParser("prism-bench serve", ABOUT)
    add = parser.add_argument
    add("--base-url", metavar="URL", help="of a server that speaks OpenAI's chat completions")
    add("--api-key-file", type=Path, metavar="FILE", help="with the key for --base-url")
    add(
        "--set", action="append", default=[], type=group_option, metavar="GROUP.OPTION=VALUE",
        help="an option of the prism-serve that is started; repeatable",
    )  # fmt: skip
    _number(parser, "--starts", 1, "times that the server is started, the last for the phases")
    add(
        "--phase", action="append", choices=["start", *PHASES], metavar="NAME",
        help="repeatable [default: a, b, c, d]",
    )  # fmt: skip
    _number(parser, "--repeats", plan.repeats, "of each phase and setting")
    _add_picture_options(parser, plan.shape)
    _add_load_options(parser, plan)
    add(
        "--seed", type=int, default=plan.shape.seed, metavar="N",
        help="another one for a server that knows these pictures",
    )  # fmt: skip
    add(
        "--body", default=json.dumps(plan.shape.extra_fields), metavar="JSON",
        help="more fields of every request [default: %(default)s]",
    )  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="keep every request's times")
    add("--plot", type=Path, metavar="FILE", help="SVG of the times to first token")
    return parser


def _add_picture_options(parser: ArgumentParser, shape: LoadShape) -> None:
    _number(parser, "--groups", shape.num_groups, "of pictures, in b and load")
    _number(parser, "--questions", shape.num_questions, "about each group, in b")
    _number(parser, "--pictures", shape.pictures_per_group, "in a group")
    parser.add_argument(
        "--picture-size", type=size, default=shape.picture_size, metavar="WxH", help="pixels [default: 448x448]"
    )
    _number(parser, "--output-tokens", shape.output_tokens, "of an answer about pictures")


def _add_load_options(parser: ArgumentParser, plan: LoadPlan) -> None:
    _numbers(parser, "--concurrencies", plan.concurrencies, "closed loops of b")
    _numbers(parser, "--batches", plan.batches, "streams at once in c")
    _number(parser, "--context-words", plan.context_words, "of a prompt in c")
    _number(parser, "--decode-tokens", plan.decode_tokens, "of a stream in c and d")
    _number(parser, "--streams", plan.num_decoders, "that decode in d")
    _number(parser, "--requests", plan.num_requests, "in load")
    _number(parser, "--concurrency", plan.concurrency, "closed loop of load")
    parser.add_argument("--rate", type=positive_number, metavar="X", help="load: Poisson arrivals, X a second")
    exponent = plan.shape.zipf_exponent
    parser.add_argument(
        "--zipf", type=float, default=exponent, metavar="X", help="exponent in load [default: %(default)s]"
    )


def _number(parser: ArgumentParser, flag: str, default: int, text: str) -> None:
    parser.add_argument(flag, type=positive, default=default, metavar="N", help=f"{text} [default: {default}]")


def _numbers(parser: ArgumentParser, flag: str, default: Sequence[int], text: str) -> None:
    shown = ",".join(map(str, default))
    parser.add_argument(flag, type=comma_list, default=default, metavar="N,N,...", help=f"{text} [default: {shown}]")
