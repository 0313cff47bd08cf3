"""Which pod a request goes to: the least estimated time to its first token, within a bound on load.

Pure: the same fleet, request and time give the same decision, and deciding changes nothing.

Pods that hold something of the request compete by time. Against them stands the first pod of the rendezvous order that
the bound allows: the home of cold keys, and the next place for a copy when those that hold a hot key have enough to do.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from prism_server.identity import Digest
from prism_server.router.decision import Candidate, Decision, NoPod, Reason
from prism_server.router.fleet import Fleet, PodState
from prism_server.router.knowledge import KeyIndex, slots_of
from prism_server.router.load_bound import DEFAULT_RULES, LoadBound, PlacementRules
from prism_server.router.request_keys import RequestKeys

__all__ = ["Candidate", "Decision", "NoPod", "PlacementRules", "Reason", "decide", "explain"]


@dataclass(slots=True)
class _Held:
    """What one pod has of the request."""

    depth: int = 0
    """Media, or text keys, from the beginning whose KV is there or on its way."""
    is_computing: bool = False
    features: int = 0
    """Bits of the media whose encoder outputs are there or on their way."""


NOTHING = _Held()


class _Case:
    """One decision: its inputs, and what follows from them."""

    def __init__(
        self, fleet: Fleet, request: RequestKeys, open_pods: Sequence[PodState], now_s: float, rules: PlacementRules
    ) -> None:
        self._fleet = fleet
        self._request = request
        self._open = open_pods
        self._now_s = now_s
        self._rules = rules
        self._bound = LoadBound(fleet, rules, now_s)
        self._least_wait_ms = max(0.0, (min([pod.backlog.busy_until_s for pod in open_pods]) - now_s) * 1e3)
        self.key = request.home_key
        self.held = self._find_held()
        self._is_hot = self._find_is_hot()

    @cached_property
    def order(self) -> Sequence[int]:
        """Indices into the view's pods, the key's home first."""
        view = self._fleet.view
        return view.rendezvous.order(self.key) if self.key is not None else range(len(view.pods))

    @property
    def has_media(self) -> bool:
        return bool(self._request.media)

    def is_open(self, pod: PodState) -> bool:
        return pod in self._open

    def choose(self) -> PodState:
        """The warm pod of the least time, unless one more copy at the next place for one is worth its cost."""
        warm = [pod for pod in self._open if pod.slot in self.held] if self.held else []
        if self._is_hot:  # only then does a copy take load off these; else what is cold goes elsewhere
            warm = [pod for pod in warm if self.ratio(pod) <= 1.0]
        if not warm:
            return self._place_for_copy()
        best = min(warm, key=self._total_ms) if len(warm) > 1 else warm[0]
        best_ms = self._total_ms(best)
        if best_ms <= self._least_wait_ms + self._rules.copy_cost * best.costs.base_ms:
            return best  # no copy can be better
        other = self._place_for_copy()
        mean_wait_ms = sum(map(self.wait_ms, self._open)) / len(self._open)  # all wait: copies would make it worse
        copy_ms = self.wait_ms(other) + self._rules.copy_cost * self.own_ms(other) + mean_wait_ms
        return best if best_ms <= copy_ms else other

    def _find_is_hot(self) -> bool:
        """Whether the key would keep one more pod busy for a part worth having."""
        if self.key is None or not self.held:
            return False
        heat = self._fleet.heat.share(self.key) * len(self._fleet.view.pods)
        return heat / (len(self.held) + 1) >= self._rules.least_heat

    def ratio(self, pod: PodState) -> float:
        """Its load over what the bound allows for this request."""
        return self._bound.ratio(pod, self._is_hot)

    def _place_for_copy(self) -> PodState:
        """The first of the rendezvous order that is open, within the bound, and not behind with its work; for a
        request without a key the least loaded of those."""
        cold_ms = self.own_ms(self._open[0], NOTHING)
        longest_ms = self._least_wait_ms + max(self._rules.patience_ms, self._rules.patience * cold_ms)
        if self.key is None:
            free = [pod for pod in self._open if self._has_room(pod, longest_ms)]
            return self._least_loaded(free or self._open)
        pods, open_slots = self._fleet.view.pods, {pod.slot for pod in self._open}
        for index in self.order:
            pod = pods[index]
            if pod.slot in open_slots and self._has_room(pod, longest_ms):
                return pod
        return self._least_loaded(self._open)

    def _has_room(self, pod: PodState, longest_wait_ms: float) -> bool:
        return self.wait_ms(pod) <= longest_wait_ms and self.ratio(pod) <= 1.0

    def _least_loaded(self, pods: Sequence[PodState]) -> PodState:
        """Of equals the one that has done the least lately: idle pods take turns."""
        return min(pods, key=lambda pod: (self.wait_ms(pod), self.ratio(pod), pod.work, pod.name))

    def _total_ms(self, pod: PodState) -> float:
        return self.wait_ms(pod) + self.own_ms(pod)

    def wait_ms(self, pod: PodState) -> float:
        return pod.backlog.wait_ms(self._now_s)

    def own_ms(self, pod: PodState, held: _Held | None = None) -> float:
        """From the request's turn to its first token there."""
        request, found = self._request, held or self.held.get(pod.slot, NOTHING)
        uncached = max(1, request.num_tokens - self.cached_tokens(found))
        missing = sum(
            medium.num_patches
            for i, medium in enumerate(request.media)
            if i >= found.depth and not found.features >> i & 1
        )
        return pod.costs.first_token_ms(uncached, missing)

    def cached_tokens(self, held: _Held) -> int:
        """Prompt tokens whose KV is there."""
        tokens = self._request.tokens_before if self._request.media else self._request.text_tokens
        return tokens[held.depth - 1] if held.depth else 0

    def _find_held(self) -> dict[int, _Held]:
        """What every open pod has of the request, by slot; pods that have nothing are left out."""
        open_bits, held = sum(1 << pod.slot for pod in self._open), dict[int, _Held]()
        if not self._request.media:
            self._find_chain(self._request.text_chain, open_bits, self._fleet.texts, held)
            return held
        partial = 0
        for scheme, chain in self._request.chains.items():
            bits = self._fleet.view.scheme_bits.get(scheme, 0) & open_bits
            partial |= bits & ~self._find_chain(chain, bits, self._fleet.chains, held)
        for i, medium in enumerate(self._request.media):
            name = medium.name
            bits = (self._fleet.features.holders(name) | self._fleet.expected.holders(name)) & partial
            for slot in slots_of(bits):
                held.setdefault(slot, _Held()).features |= 1 << i
        return held

    def _find_chain(self, chain: Sequence[Digest], bits: int, index: KeyIndex, held: dict[int, _Held]) -> int:
        """Enters the depth of every slot of `bits`, deepest first. Returns those that hold all of the chain."""
        whole = 0
        for depth in range(len(chain), 0, -1):
            if not bits:
                break
            key = chain[depth - 1]
            there = index.holders(key) & bits
            coming = self._fleet.expected.holders(key) & bits & ~there
            for slot in slots_of(there | coming):
                held[slot] = _Held(depth, bool(coming >> slot & 1))
            bits &= ~(there | coming)
            if depth == len(chain):
                whole = there | coming
        return whole

    def reason(self, pod: PodState) -> Reason:
        found = self.held.get(pod.slot)
        if found is None:
            if self.key is None:
                return Reason.LEAST_LOADED
            is_home = self._fleet.view.pods[self.order[0]] is pod
            return Reason.HOME if is_home and not self.held else Reason.SPILL
        if found.depth and not self._request.media:
            return Reason.TEXT
        if found.depth:
            return Reason.COMPUTING if found.is_computing else Reason.CHAIN
        return Reason.FEATURES


def decide(
    fleet: Fleet,
    request: RequestKeys,
    now_s: float,
    excluded: Set[str] = frozenset(),
    rules: PlacementRules = DEFAULT_RULES,
) -> Decision | NoPod:
    """`excluded`: uids that this request has tried, or whose breaker is open."""
    case = _case(fleet, request, now_s, excluded, rules)
    return case if isinstance(case, NoPod) else _decision(case, request)


def explain(
    fleet: Fleet,
    request: RequestKeys,
    now_s: float,
    excluded: Set[str] = frozenset(),
    rules: PlacementRules = DEFAULT_RULES,
) -> tuple[Decision | NoPod, tuple[Candidate, ...]]:
    """The same decision, with every candidate's case in rendezvous order. Not for the hot path."""
    case = _case(fleet, request, now_s, excluded, rules)
    if isinstance(case, NoPod):
        return case, ()
    pods = fleet.view.pods
    candidates = tuple(
        _candidate(case, pods[index], order if case.key is not None else -1)
        for order, index in enumerate(case.order)
        if case.is_open(pods[index])
    )
    return _decision(case, request), candidates


def _case(fleet: Fleet, request: RequestKeys, now_s: float, excluded: Set[str], rules: PlacementRules) -> _Case | NoPod:
    """The pods that can take the request, or why there are none."""
    accepting = fleet.view.pods
    if not accepting:
        return NoPod("no_pods", rules.retry_after_s)
    untried = [pod for pod in accepting if pod.uid not in excluded] if excluded else accepting
    if not untried:
        return NoPod("excluded", rules.retry_after_s)
    open_pods = [pod for pod in untried if pod.saturated_until_s <= now_s and not pod.is_full]
    if not open_pods:
        known = [pod.saturated_until_s - now_s for pod in untried if pod.saturated_until_s > now_s]
        return NoPod("saturated", max(rules.retry_after_s, min(known, default=0.0)))
    return _Case(fleet, request, open_pods, now_s, rules)


def _decision(case: _Case, request: RequestKeys) -> Decision:
    pod = case.choose()
    found = case.held.get(pod.slot, NOTHING)
    return Decision(
        uid=pod.uid,
        name=pod.name,
        reason=case.reason(pod),
        cached_tokens=case.cached_tokens(found),
        cached_media=found.depth if request.media else 0,
        cached_features=(found.features >> found.depth).bit_count(),
        num_media=len(request.media),
        wait_ms=case.wait_ms(pod),
        own_ms=case.own_ms(pod),
    )


def _candidate(case: _Case, pod: PodState, order: int) -> Candidate:
    found = case.held.get(pod.slot, NOTHING)
    return Candidate(
        uid=pod.uid,
        name=pod.name,
        order=order,
        wait_ms=case.wait_ms(pod),
        own_ms=case.own_ms(pod),
        load_ratio=case.ratio(pod),
        cached_tokens=case.cached_tokens(found),
        cached_media=found.depth if case.has_media else 0,
        cached_features=(found.features >> found.depth).bit_count(),
    )
