"""`prism-bench accuracy`: the bundled model is asked through real servers; answers are counted, servers compared."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from prism_server.bench.client import Answer, Client, Json, clip_message, user_message
from prism_server.bench.questions import CLIP_LAYOUTS, MAX_ANSWER_TOKENS, PICTURE_LAYOUTS, Question, draw_questions
from prism_server.bench.report import environment
from prism_server.bench.scores import REFERENCE, Run, Scores
from prism_server.bench.server_process import ServerProcess, cpu_threads

CHUNK_TOKENS = "16"

VARIANTS: dict[str, dict[str, str]] = {
    "fp8": {"kv.dtype": "fp8"},
    "bf16": {"kv.dtype": "bf16"},
    "fp8-uncached": {"kv.dtype": "fp8", "kv.prefix_cache": "false"},
    "bf16-uncached": {"kv.dtype": "bf16", "kv.prefix_cache": "false"},
    "fp8-chunked": {"kv.dtype": "fp8", "engine.chunk_tokens": CHUNK_TOKENS},
    "bf16-chunked": {"kv.dtype": "bf16", "engine.chunk_tokens": CHUNK_TOKENS},
    "fp8-uncached-chunked": {"kv.dtype": "fp8", "kv.prefix_cache": "false", "engine.chunk_tokens": CHUNK_TOKENS},
    "bf16-uncached-chunked": {"kv.dtype": "bf16", "kv.prefix_cache": "false", "engine.chunk_tokens": CHUNK_TOKENS},
}
"""What must not change the answers: the type of the KV, the prefix cache, prefill in chunks of 16 tokens."""
DEFAULT_VARIANTS = ("fp8", "bf16", "fp8-uncached", "bf16-uncached", "fp8-chunked", "bf16-chunked")

COSTS = ("decoded_items", "encoded_items", "prefilled_tokens", "prefilled_media_tokens", "cached_tokens")
COSTS_SHOWN = (*COSTS, "cached_media_tokens", "prompt_tokens", "completion_tokens")


@dataclass(frozen=True, slots=True)
class AccuracyPlan:
    """What to ask, how, and of whom: of a server for each variant, or of the one at `base_url`."""

    num_questions: int = 456
    seed: int = 0
    clips: bool = False
    """About clips, half of them sent as lists of frames, half as files, instead of pictures, pages and text."""
    num_clients: int = 8
    variants: Sequence[str] = DEFAULT_VARIANTS
    with_reference: bool = False
    base_url: str | None = None
    api_key: str | None = None
    server_options: Mapping[str, str] = field(default_factory=dict)
    """For every server that is started, beside what the variant sets."""


def measure(plan: AccuracyPlan) -> Scores:
    """Asks everybody the same questions, one system after the other. Raises AnswerFailed, StartupError."""
    questions = draw_questions(plan.num_questions, plan.seed, CLIP_LAYOUTS if plan.clips else PICTURE_LAYOUTS)
    runs: list[Run] = []
    if plan.base_url is not None:
        runs.append(_run("server", {}, plan.base_url, questions, plan))
    else:
        for variant in plan.variants:
            options = VARIANTS[variant] | dict(plan.server_options)
            with ServerProcess({"model.threads": str(cpu_threads())} | options) as server:
                runs.append(_run(variant, options, server.api_url, questions, plan))
    if plan.with_reference:
        runs.append(_reference_run(questions))
    return Scores(questions, runs)


def report(plan: AccuracyPlan, scores: Scores) -> dict[str, object]:
    """The JSON of a measurement: how to repeat it, where it was made, what came out."""
    return {
        "measurement": "accuracy",
        "seed": plan.seed,
        "clips": plan.clips,
        "clients": plan.num_clients,
        "environment": environment(),
        **scores.as_json(),
    }


def _run(name: str, options: dict[str, str], url: str, questions: Sequence[Question], plan: AccuracyPlan) -> Run:
    started_s = time.monotonic()
    answers = asyncio.run(_ask_all(url, questions, plan, _Counter(name, len(questions))))
    costs = {cost: sum(getattr(answer.usage, cost) for answer in answers) for cost in COSTS_SHOWN}
    texts = tuple(answer.text for answer in answers)
    return Run(name, texts, time.monotonic() - started_s, options, costs)


async def _ask_all(
    url: str, questions: Sequence[Question], plan: AccuracyPlan, on_answer: Callable[[int], None]
) -> list[Answer]:
    """Answers in the order of the questions, `num_clients` at a time."""
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(questions))

    async def ask_on(client: Client, model: str) -> None:
        for index, question in waiting:
            answers[index] = await client.chat([_message(question)], model=model, max_tokens=MAX_ANSWER_TOKENS)
            on_answer(len(answers))

    async with Client(url, plan.api_key) as client, asyncio.TaskGroup() as group:
        model = await client.model_name()
        for _ in range(plan.num_clients):
            group.create_task(ask_on(client, model))
    return [answers[index] for index in range(len(questions))]


def _message(question: Question) -> Json:
    if question.fps is None:
        return user_message(question.pictures, question.text)
    return clip_message(question.pictures, question.fps, question.file, question.text)


def _reference_run(questions: Sequence[Question]) -> Run:
    from prism_server.bench.reference import Reference  # needs transformers, which servers do not

    reference = Reference(cpu_threads())
    started_s = time.monotonic()
    answers = reference.answer_all(questions, MAX_ANSWER_TOKENS, _Counter(REFERENCE, len(questions)))
    return Run(REFERENCE, answers, time.monotonic() - started_s)


@dataclass(frozen=True, slots=True)
class _Counter:
    """Shows on a terminal how many questions are answered."""

    name: str
    total: int

    def __call__(self, done: int) -> None:
        if sys.stderr.isatty():
            end = "\n" if done == self.total else ""
            print(f"\r{self.name}: {done} of {self.total} answered", end=end, file=sys.stderr, flush=True)
