"""Ways to choose a pod: Prism's own code, and the usual ones it is compared with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from prism_server.bench.placement_world import SimulatedPod
from prism_server.identity import Digest
from prism_server.router.fleet import Fleet
from prism_server.router.placement import NoPod, decide
from prism_server.router.pods import Pod
from prism_server.router.rendezvous import Rendezvous
from prism_server.router.request_keys import RequestKeys

POLL_S = 0.25
"""How often a router asks a pod what it holds."""


class Policy:
    """Chooses a pod for each request. Times are seconds, and never go back."""

    polls = False
    """Whether `poll` wants to be called for every pod, every `POLL_S`."""
    follows = False
    """Whether `first_byte` and `finish` want to be called."""

    def __init__(self, pods: Sequence[SimulatedPod], seed: int) -> None:
        self._pods = pods

    def place(self, request: RequestKeys, question: int, now_s: float) -> tuple[int, Any]:
        """The pod's index, and what is handed back to `first_byte` and `finish`. `question` names the text asked."""
        raise NotImplementedError

    def poll(self, reader_and_pod: tuple[int, int], now_s: float) -> None:
        """One router asks one pod."""

    def first_byte(self, placed: Any, now_s: float) -> None:
        """The prompt is computed."""

    def finish(self, placed: Any, now_s: float) -> None:
        """The answer is complete."""


class Prism(Policy):
    """The real placement: `Fleet` and `decide`, in several routers that share nothing; each gets requests at random."""

    polls = follows = True

    def __init__(self, pods: Sequence[SimulatedPod], seed: int, num_routers: int = 2) -> None:
        super().__init__(pods, seed)
        self._index = {pod.name: index for index, pod in enumerate(pods)}
        self._fleets = [Fleet() for _ in range(num_routers)]
        self._draw = random.Random(seed)
        self.expected_tokens = 0
        for fleet in self._fleets:
            fleet.set_pods([Pod(pod.name, pod.name) for pod in pods], 0.0)

    @property
    def num_routers(self) -> int:
        return len(self._fleets)

    def place(self, request: RequestKeys, question: int, now_s: float) -> tuple[int, Any]:
        fleet = self._draw.choice(self._fleets)
        decision = decide(fleet, request, now_s)
        if isinstance(decision, NoPod):
            raise RuntimeError(f"no pod for a request: {decision}")
        self.expected_tokens += decision.cached_tokens
        return self._index[decision.name], (fleet, fleet.dispatch(decision, request, now_s))

    def poll(self, reader_and_pod: tuple[int, int], now_s: float) -> None:
        reader, index = reader_and_pod
        pod = self._pods[index]
        self._fleets[reader].apply(pod.name, pod.answer(reader, now_s), now_s, now_s)

    def first_byte(self, placed: Any, now_s: float) -> None:
        fleet, ticket = placed
        fleet.first_byte(ticket, now_s)

    def finish(self, placed: Any, now_s: float) -> None:
        fleet, ticket = placed
        fleet.finish(ticket, now_s)


class RandomPod(Policy):
    """Any pod."""

    def __init__(self, pods: Sequence[SimulatedPod], seed: int) -> None:
        super().__init__(pods, seed)
        self._draw = random.Random(seed)

    def place(self, request: RequestKeys, question: int, now_s: float) -> tuple[int, Any]:
        return self._draw.randrange(len(self._pods)), None


class RoundRobin(Policy):
    """One pod after the other."""

    _next = -1

    def place(self, request: RequestKeys, question: int, now_s: float) -> tuple[int, Any]:
        self._next = (self._next + 1) % len(self._pods)
        return self._next, None


class LeastLoaded(Policy):
    """The pod with the fewest requests inside, known without delay; among equals any."""

    follows = True

    def __init__(self, pods: Sequence[SimulatedPod], seed: int) -> None:
        super().__init__(pods, seed)
        self._inside = [0] * len(pods)
        self._draw = random.Random(seed)

    def place(self, request: RequestKeys, question: int, now_s: float) -> tuple[int, Any]:
        index = self._least()
        self._inside[index] += 1
        return index, index

    def _least(self) -> int:
        least = min(self._inside)
        return self._draw.choice([index for index, inside in enumerate(self._inside) if inside == least])

    def finish(self, placed: Any, now_s: float) -> None:
        self._inside[placed] -= 1


class ConsistentHash(Policy):
    """The first picture's home, whatever the load."""

    def __init__(self, pods: Sequence[SimulatedPod], seed: int) -> None:
        super().__init__(pods, seed)
        self._rendezvous = Rendezvous([pod.name for pod in pods], [1.0] * len(pods))
        self._homes: dict[Digest, int] = {}

    def place(self, request: RequestKeys, question: int, now_s: float) -> tuple[int, Any]:
        key = request.media[0].name
        home = self._homes.get(key)
        if home is None:
            home = self._homes[key] = self._rendezvous.order(key)[0]
        return home, None


class TextPrefix(LeastLoaded):
    """What routers that see text alone do: the pod that had the same text last, unless it is far behind the others.

    Pictures are not text, so the same question about other pictures is the same request to it.
    """

    FAR_BEHIND_REQUESTS = 32
    FAR_BEHIND_FACTOR = 1.5

    def __init__(self, pods: Sequence[SimulatedPod], seed: int) -> None:
        super().__init__(pods, seed)
        self._last: dict[int, int] = {}

    def place(self, request: RequestKeys, question: int, now_s: float) -> tuple[int, Any]:
        most, least = max(self._inside), min(self._inside)
        uneven = most - least > self.FAR_BEHIND_REQUESTS and most > least * self.FAR_BEHIND_FACTOR
        index = self._last.get(question)
        if index is None or uneven:
            index = self._last[question] = self._least()
        self._inside[index] += 1
        return index, index


OTHERS: dict[str, type[Policy]] = {
    "random": RandomPod,
    "round robin": RoundRobin,
    "least loaded": LeastLoaded,
    "consistent hash": ConsistentHash,
    "text prefix": TextPrefix,
}
