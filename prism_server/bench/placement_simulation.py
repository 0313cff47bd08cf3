"""`prism-bench placement`: a million requests through the router's own placement code, and through the usual others.

Every cell (a number of pods, a Zipf exponent) has one seeded trace of requests, which all policies serve. Its pace is
such that one pod with all the memory and all the compute would be busy for 60 % of the time.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prism_server.bench.placement_policies import OTHERS, POLL_S, Policy, Prism
from prism_server.bench.placement_world import Catalogue, Served, SimulatedPod, draw_requests
from prism_server.router.request_keys import RequestKeys

PODS = (2, 4, 16, 64)
ZIPF_EXPONENTS = (0.6, 1.0, 1.4)
UTILISATION = 0.6
NUM_QUESTIONS = 200
WARM_UP = 0.2
"""Share of a trace before anything is counted."""
PRISM = "prism"
HIT_GOAL_POINTS = 2.0
BUSIEST_GOAL = 1.25
GOAL_PODS = 4


@dataclass(frozen=True, slots=True)
class Plan:
    """What is simulated. `num_requests` are over all cells; each policy serves them all."""

    num_requests: int = 1_000_000
    seed: int = 0
    pods: Sequence[int] = PODS
    exponents: Sequence[float] = ZIPF_EXPONENTS
    num_routers: int = 2

    @property
    def requests_per_cell(self) -> int:
        return -(-self.num_requests // (len(self.pods) * len(self.exponents)))


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one policy did in one cell, after the warm-up."""

    hit_rate: float
    """Prompt tokens found in the KV cache over all prompt tokens."""
    busiest_requests: float
    """Requests of the busiest pod over the mean."""
    busiest_work: float
    """Work of the busiest pod over the mean."""
    ttft_p50_ms: float
    ttft_p99_ms: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One number of pods and one exponent."""

    num_pods: int
    exponent: float
    num_groups: int
    one_pod_hit_rate: float
    """Of one pod that has all the memory."""
    requests_per_s: float
    outcomes: dict[str, Outcome]
    wall_s: dict[str, float]

    @property
    def hit_gap_points(self) -> float:
        """How far Prism stays behind the one pod."""
        return 100 * (self.one_pod_hit_rate - self.outcomes[PRISM].hit_rate)

    def misses(self) -> list[str]:
        """The goals that Prism missed here."""
        prism, missed = self.outcomes[PRISM], []
        if self.hit_gap_points > HIT_GOAL_POINTS:
            missed.append(f"hit rate {self.hit_gap_points:.1f} points below one pod's")
        for what, busiest in (("requests", prism.busiest_requests), ("work", prism.busiest_work)):
            if busiest > BUSIEST_GOAL:
                missed.append(f"busiest pod's {what} {busiest:.2f} of the mean")
        return missed


def simulate(plan: Plan, tell: Callable[[Cell], None] = lambda cell: None) -> list[Cell]:
    """All cells, in order. Deterministic but for `wall_s`."""
    cells = []
    for num_pods in plan.pods:
        catalogue = Catalogue(num_pods, np.random.default_rng([plan.seed, num_pods]))
        for exponent in plan.exponents:
            cells.append(_cell(plan, catalogue, num_pods, exponent))
            tell(cells[-1])
    return cells


def _cell(plan: Plan, catalogue: Catalogue, num_pods: int, exponent: float) -> Cell:
    rng = np.random.default_rng([plan.seed, num_pods, round(exponent * 1000)])
    requests = draw_requests(catalogue, plan.requests_per_cell, exponent, rng)
    hit_rate, mean_work_ms = _one_pod(requests, num_pods)
    per_s = UTILISATION * num_pods * 1e3 / mean_work_ms
    asked = _Asked(
        requests,
        np.cumsum(rng.exponential(1 / per_s, len(requests))).tolist(),
        rng.integers(0, NUM_QUESTIONS, len(requests)).tolist(),
    )
    outcomes, wall_s = dict[str, Outcome](), dict[str, float]()
    for name in (PRISM, *OTHERS):
        started_s = time.perf_counter()
        outcomes[name] = _serve(asked, num_pods, name, plan)
        wall_s[name] = round(time.perf_counter() - started_s, 2)
    return Cell(num_pods, exponent, len(catalogue), hit_rate, per_s, outcomes, wall_s)


def _one_pod(requests: Sequence[RequestKeys], memory: int) -> tuple[float, float]:
    """Hit rate after the warm-up, and mean work in milliseconds, of one pod with the memory of `memory` pods."""
    pod = SimulatedPod("one", memory)
    served = [pod.serve(request, 0.0) for request in requests]
    counted = range(_warm_at(requests), len(requests))
    cached, total = sum(served[i].cached_tokens for i in counted), sum(requests[i].num_tokens for i in counted)
    return cached / total, sum(served[i].work_ms for i in counted) / len(counted)


def _warm_at(requests: Sequence[RequestKeys]) -> int:
    return int(WARM_UP * len(requests))


@dataclass(frozen=True, slots=True)
class _Asked:
    """The requests of a cell, when they come, and which text they ask."""

    requests: list[RequestKeys]
    arrivals_s: list[float]
    questions: list[int]


def _serve(asked: _Asked, num_pods: int, name: str, plan: Plan) -> Outcome:
    """All requests by one policy."""
    is_prism = name == PRISM
    pods = [SimulatedPod(f"pod-{i}", num_readers=plan.num_routers if is_prism else 0) for i in range(num_pods)]
    policy = Prism(pods, plan.seed, plan.num_routers) if is_prism else OTHERS[name](pods, plan.seed)
    events = _Events(policy, num_pods, plan.num_routers)
    tally, warm_at = _Tally(num_pods), _warm_at(asked.requests)
    for i, (request, now_s) in enumerate(zip(asked.requests, asked.arrivals_s, strict=True)):
        events.until(now_s)
        index, placed = policy.place(request, asked.questions[i], now_s)
        served = pods[index].serve(request, now_s)
        events.add(placed, served)
        if i >= warm_at:
            tally.add(index, request, served, now_s)
    return tally.outcome()


class _Events:
    """What happens between arrivals: first bytes, ends of answers, polls; told to a policy that wants to know."""

    def __init__(self, policy: Policy, num_pods: int, num_routers: int) -> None:
        self._policy = policy
        self._numbers = itertools.count()  # equal times in the order they were entered
        self._heap: list[tuple[float, int, Callable[[Any, float], None], Any]] = []
        if policy.polls:
            pairs = list(itertools.product(range(num_routers), range(num_pods)))
            for i, pair in enumerate(pairs):
                self._push(POLL_S * i / len(pairs), self._poll, pair)

    def until(self, now_s: float) -> None:
        while self._heap and self._heap[0][0] <= now_s:
            at_s, _, action, argument = heapq.heappop(self._heap)
            action(argument, at_s)

    def add(self, placed: Any, served: Served) -> None:
        if self._policy.follows:
            self._push(served.first_byte_s, self._policy.first_byte, placed)
            self._push(served.end_s, self._policy.finish, placed)

    def _poll(self, reader_and_pod: tuple[int, int], now_s: float) -> None:
        self._policy.poll(reader_and_pod, now_s)
        self._push(now_s + POLL_S, self._poll, reader_and_pod)

    def _push(self, at_s: float, action: Callable[[Any, float], None], argument: Any) -> None:
        heapq.heappush(self._heap, (at_s, next(self._numbers), action, argument))


class _Tally:
    """Sums of one policy's run."""

    def __init__(self, num_pods: int) -> None:
        self._requests = np.zeros(num_pods, dtype=np.int64)
        self._work_ms = np.zeros(num_pods)
        self._cached_tokens = self._tokens = 0
        self._ttft_ms: list[float] = []

    def add(self, index: int, request: RequestKeys, served: Served, arrival_s: float) -> None:
        self._requests[index] += 1
        self._work_ms[index] += served.work_ms
        self._cached_tokens += served.cached_tokens
        self._tokens += request.num_tokens
        self._ttft_ms.append((served.first_byte_s - arrival_s) * 1e3)

    def outcome(self) -> Outcome:
        p50_ms, p99_ms = np.percentile(self._ttft_ms, (50, 99))
        return Outcome(
            hit_rate=self._cached_tokens / self._tokens,
            busiest_requests=float(self._requests.max() / self._requests.mean()),
            busiest_work=float(self._work_ms.max() / self._work_ms.mean()),
            ttft_p50_ms=float(p50_ms),
            ttft_p99_ms=float(p99_ms),
        )
