"""`prism-bench serve`: the phases of a measurement, run against a server that is there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from dataclasses import dataclass, field

from prism_server.bench.load_client import LoadClient
from prism_server.bench.load_shape import Job, LoadMaker, LoadShape, poisson_arrivals_s
from prism_server.bench.stream_stats import StreamResult

HOT_QUESTIONS = 2
"""After the cold one about each group of phase a."""
DECODER_WORDS = 512
ARRIVAL_AFTER_S = 0.8
"""Phase d's streams decode that long before the cold request arrives."""
COLD_OUTPUT_TOKENS = 16
WARM_UP_TOKENS = 16

PHASES = {
    "a": "one request at a time: the first question about eight pictures, then two more",
    "b": "every question about every group once, in closed loops",
    "c": "text streams decode side by side",
    "d": "streams decode, and a cold request arrives beside them",
    "load": "questions about groups drawn by Zipf's law, in a closed loop or by Poisson arrivals",
}


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What is run, how often and how hard."""

    shape: LoadShape = field(default_factory=LoadShape)
    phases: Sequence[str] = ("a", "b", "c", "d")
    repeats: int = 5
    """Of each phase and setting, each with pictures and texts of its own."""
    concurrencies: Sequence[int] = (4, 16, 32)
    batches: Sequence[int] = (1, 8, 32, 64)
    context_words: int = 2000
    decode_tokens: int = 256
    num_decoders: int = 8
    num_requests: int = 200
    """Of one run of `load`, with `concurrency` at once, or `rate` a second where that is given."""
    concurrency: int = 16
    rate: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One pass over a phase at one setting."""

    results: tuple[StreamResult, ...] = field(repr=False)
    wall_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A phase at one setting, as often as it was repeated."""

    phase: str
    setting: str
    runs: tuple[Run, ...]


async def run_phases(client: LoadClient, plan: LoadPlan) -> AsyncIterator[Measured]:
    """Warms the server up, then runs phase after phase; a failed request is in the results, not an exception."""
    phases = _Phases(client, plan)
    await phases.warm_up()
    for name in plan.phases:
        for setting, number in phases.settings(name):
            runs = [await phases.run(name, number, repeat) for repeat in range(plan.repeats)]
            yield Measured(name, setting, tuple(runs))


class _Phases:
    def __init__(self, client: LoadClient, plan: LoadPlan) -> None:
        self._client = client
        self._plan = plan
        self._maker = LoadMaker(plan.shape, client.model)

    def settings(self, phase: str) -> list[tuple[str, int]]:
        """What a phase is repeated with: in words, and its number of requests at once."""
        plan = self._plan
        if phase == "b":
            return [(f"closed loop of {n}", n) for n in plan.concurrencies]
        if phase == "c":
            return [(f"batch {n}", n) for n in plan.batches]
        if phase == "d":
            return [(f"{plan.num_decoders} streams", plan.num_decoders)]
        if phase == "load":
            by = f"{plan.rate:g} a second" if plan.rate else f"closed loop of {plan.concurrency}"
            return [(f"{by}, Zipf {plan.shape.zipf_exponent:g}", plan.concurrency)]
        return [("one at a time", 1)]

    async def warm_up(self) -> None:
        for question in range(2):
            await self._send(self._maker.about("warm", question, "cold", WARM_UP_TOKENS))
        await self._send(self._maker.text("warm", self._plan.context_words, WARM_UP_TOKENS))

    async def run(self, phase: str, number: int, repeat: int) -> Run:
        name = f"{phase}{number}.{repeat}"
        if phase == "c":
            jobs = [self._stream(f"{name} {i}", self._plan.context_words) for i in range(number)]
            return await _timed(*map(self._send, jobs))
        if phase == "d":
            return await self._arrival(name, number)
        if phase == "load":
            jobs = self._maker.drawn_questions(name, self._plan.num_requests)
            if self._plan.rate:
                seed = f"{self._plan.shape.seed} {name} arrivals"
                return await self._open_loop(jobs, poisson_arrivals_s(self._plan.rate, seed, len(jobs)))
            return await self._closed_loop(jobs, number)
        if phase == "b":
            return await self._closed_loop(self._maker.every_question(name), number)
        first = self._maker.about(name, 0, "cold")
        more = [self._maker.about(name, 1 + question, "hot") for question in range(HOT_QUESTIONS)]
        return await self._closed_loop([first, *more], 1)

    async def _closed_loop(self, jobs: Iterable[Job], number: int) -> Run:
        """`number` clients, each of which sends its next request when its last has ended."""
        waiting, results = iter(jobs), list[StreamResult]()

        async def ask() -> None:
            for job in waiting:
                results.append(await self._send(job))

        started_s = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(number)))
        return Run(tuple(results), time.perf_counter() - started_s)

    async def _open_loop(self, jobs: Sequence[Job], arrivals_s: Sequence[float]) -> Run:
        async def send_at(job: Job, after_s: float) -> StreamResult:
            await asyncio.sleep(after_s)
            return await self._send(job)

        return await _timed(*map(send_at, jobs, arrivals_s))

    async def _arrival(self, name: str, num_streams: int) -> Run:
        """Streams decode; a cold request arrives in their midst. Its result is the last."""
        streams = [self._stream(f"{name} {i}", DECODER_WORDS) for i in range(num_streams)]
        cold = self._maker.about(name, 0, "cold", COLD_OUTPUT_TOKENS)

        async def arrive() -> StreamResult:
            await asyncio.sleep(ARRIVAL_AFTER_S)
            return await self._send(cold)

        return await _timed(*map(self._send, streams), arrive())

    def _stream(self, name: str, num_words: int) -> Job:
        return self._maker.text(name, num_words, self._plan.decode_tokens)

    async def _send(self, job: Job) -> StreamResult:
        return await self._client.send(job.body, job.kind)


async def _timed(*requests: Awaitable[StreamResult]) -> Run:
    started_s = time.perf_counter()
    results = await asyncio.gather(*requests)
    return Run(tuple(results), time.perf_counter() - started_s)
