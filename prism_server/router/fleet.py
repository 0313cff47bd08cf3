"""All that one router knows: pods, what they hold, what is under way. Changed on the event loop only; no clock, no I/O.

Every `now_s` is the caller's monotonic clock in seconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from prism_server.identity import Digest
from prism_server.router.decision import Decision
from prism_server.router.estimate import believed
from prism_server.router.knowledge import ExpectedKeys, KeyIndex
from prism_server.router.load import FADING_S, FadingClock, Heat
from prism_server.router.pod_state import PodState, Position, Ticket
from prism_server.router.pods import CacheAnswer, KeyScheme, Pod, PodLoad
from prism_server.router.request_keys import RequestKeys
from prism_server.router.view import View

__all__ = ["Fleet", "FleetRules", "FleetStats", "PodState", "Position", "Ticket"]

REPORT_DELAY_S = 0.1
"""A pod reports what it has made no later than this after the first byte."""
SETTLE_EVERY_S = 1.0
UNREPORTED_S = 5.0
"""Without reports, what was made is believed for this long."""


@dataclass(frozen=True, slots=True)
class FleetRules:
    """Bounds of memory, and the pace at which new pods get work."""

    max_chains_per_pod: int = 131_072
    max_features_per_pod: int = 65_536
    max_texts_per_pod: int = 8_192
    max_links: int = 100_000
    max_hot_keys: int = 32_768
    slow_start_s: float = 30.0
    """Until a pod that has just become ready gets its whole share."""


@dataclass(frozen=True, slots=True)
class FleetStats:
    """Gauges `_now`; the others only grow."""

    pods_now: int
    accepting_pods_now: int
    in_flight_now: int
    chains_now: int
    features_now: int
    expected_now: int
    """Entries of requests under way that no pod has confirmed yet."""
    unknown_key_pods_now: int
    links_now: int
    snapshots: int
    epochs_lost: int
    dropped_keys: int
    """Keys not kept because a pod reported more than the bound."""
    unknown_key_decisions: int


class Fleet:
    """Pods, knowledge and load of one router."""

    def __init__(self, rules: FleetRules = FleetRules()) -> None:
        self.rules = rules
        self.chains = KeyIndex(rules.max_chains_per_pod)
        self.features = KeyIndex(rules.max_features_per_pod)
        self.texts = KeyIndex(rules.max_texts_per_pod)
        self.expected = ExpectedKeys()
        self.heat = Heat(rules.max_hot_keys)
        self._pods: dict[str, PodState] = {}
        self._links: dict[Digest, Digest] = {}
        self._fading = FadingClock(FADING_S)
        self._snapshots = self._epochs_lost = self._unknown_key_decisions = 0
        self._settled_s = float("-inf")
        self._view: View | None = None

    # --- discovery

    def set_pods(self, pods: Iterable[Pod], now_s: float) -> None:
        """The pods there are now. What is known about uids that are gone is forgotten."""
        given = {pod.uid: pod for pod in pods}
        for uid in self._pods.keys() - given.keys():
            self._forget(self._pods.pop(uid))
        for uid, pod in given.items():
            state = self._pods.get(uid)
            if state is None:
                self._pods[uid] = PodState(pod, self._free_slot(), now_s)
            else:
                if pod.is_ready and not state.pod.is_ready:
                    state.ready_since_s = now_s
                state.pod = pod
        self._view = None

    def _free_slot(self) -> int:
        taken = {state.slot for state in self._pods.values()}
        return next(slot for slot in range(len(taken) + 1) if slot not in taken)

    def _forget(self, state: PodState) -> None:
        """The pod holds nothing any more."""
        state.life += 1
        for index in (self.chains, self.features, self.texts, self.expected):
            index.clear(state.slot)

    # --- polls

    def position(self, uid: str) -> Position | None:
        """Where to go on polling; None: ask for a snapshot."""
        state = self._pods.get(uid)
        return state.position if state else None

    def apply(self, uid: str, answer: CacheAnswer, asked_s: float, now_s: float) -> None:
        """Takes an answer in; `asked_s` is when the poll was sent. An unknown uid is ignored."""
        state = self._pods.get(uid)
        if state is None:
            return
        self._meet(state, answer.scheme, answer.epoch)
        position = state.position
        if position is None and not answer.is_snapshot:
            return  # changes of something unknown: the next poll asks for all of it
        if answer.is_snapshot:
            self._snapshots += 1
            self.chains.clear(state.slot)
            self.features.clear(state.slot)
        elif position is not None and answer.cursor < position.cursor:
            return  # overtaken by a later answer
        for index, added, evicted in (
            (self.chains, answer.chains_added, answer.chains_evicted),
            (self.features, answer.features_added, answer.features_evicted),
        ):
            index.remove(state.slot, evicted)
            index.add(state.slot, added)
        state.position = Position(answer.epoch, answer.cursor)
        self._learn_links(answer)
        self._take_load(state, answer.load, asked_s, now_s)
        state.answer_s = now_s
        self.expected.settle(state.slot, asked_s - REPORT_DELAY_S)
        self._settle_unreported(now_s)

    def _settle_unreported(self, now_s: float) -> None:
        """Also for pods that do not answer polls: what was made at them is not believed for ever."""
        if now_s >= self._settled_s + SETTLE_EVERY_S:
            self._settled_s = now_s
            for state in self._pods.values():
                self.expected.settle(state.slot, now_s - UNREPORTED_S)

    def _meet(self, state: PodState, scheme: KeyScheme, epoch: str) -> None:
        """Another epoch, or other keys: all that was known is about something that is no more."""
        known = state.position
        if state.scheme != scheme or (known is not None and known.epoch != epoch):
            if known is not None:
                self._epochs_lost += 1
                self._forget(state)
            state.scheme, state.position = scheme, None
            self._view = None

    def _take_load(self, state: PodState, load: PodLoad, asked_s: float, now_s: float) -> None:
        if (load.total_pages, load.is_draining) != (state.load.total_pages, state.load.is_draining):
            self._view = None
        state.load = load
        self._take_costs(state)
        state.others_inside = max(0, load.inside - state.in_flight)
        tokens = load.uncached_tokens
        state.backlog.report(None if tokens is None else state.costs.backlog_ms(tokens), asked_s, now_s)

    def _take_costs(self, state: PodState) -> None:
        own = state.load
        if own.ms_per_token is None or own.ms_per_patch is None:
            return
        loads = [other.load for other in self._pods.values()]
        state.costs = replace(
            state.costs,
            ms_per_token=believed(own.ms_per_token, [ms for load in loads if (ms := load.ms_per_token) is not None]),
            ms_per_patch=believed(own.ms_per_patch, [ms for load in loads if (ms := load.ms_per_patch) is not None]),
        )

    def _learn_links(self, answer: CacheAnswer) -> None:
        for link in answer.links:
            self._links[link.url_digest] = link.content_id
        while len(self._links) > self.rules.max_links:
            del self._links[next(iter(self._links))]

    @property
    def view(self) -> View:
        """The pods that take new requests, in the form placement reads."""
        if self._view is None:
            self._view = View.of(self._pods.values(), self.rules.slow_start_s)
        return self._view

    # --- requests

    @property
    def schemes(self) -> tuple[KeyScheme, ...]:
        """Distinct computable schemes among the pods: what `read_request` is to compute."""
        return self.view.schemes

    def content_of(self, url_digest: Digest) -> Digest | None:
        """The content a link led to, if a pod has said so. Any thread."""
        return self._links.get(url_digest)

    def dispatch(self, decision: Decision, request: RequestKeys, now_s: float) -> Ticket:
        """The request goes where it was decided; that pod is expected to hold its media soon.

        No other change of the fleet may lie between `decide` and this.
        """
        state = self._pods[decision.uid]
        chain = request.chains.get(state.scheme, ()) if state.scheme else ()
        features = tuple(dict.fromkeys(medium.name for medium in request.media)) if state.speaks_known_keys else ()
        keys = (*chain, *features)
        self.expected.begin(state.slot, keys)
        self.texts.add(state.slot, request.text_chain)
        state.in_flight += 1
        state.backlog.add(decision.own_ms, now_s)
        self._rebase(now_s)
        if request.home_key is not None:
            self.heat.add(request.home_key, now_s)
        work_ms = decision.own_ms + state.costs.answer_ms(request.answer_tokens)
        state.work += work_ms * self._fading.scale(now_s)
        state.requests += self._fading.scale(now_s)
        self._unknown_key_decisions += state.scheme is not None and not state.scheme.is_known
        return Ticket(state, keys, state.life, now_s, decision.own_ms, work_ms)

    def first_byte(self, ticket: Ticket, now_s: float) -> None:
        """The pod has computed the prompt, which a refusal does not show. Further calls change nothing."""
        if not ticket.is_computed:
            ticket.is_computed = True
            if ticket.life == ticket.pod.life:
                self.expected.made(ticket.pod.slot, ticket.keys, now_s)
            self._settle_unreported(now_s)

    def finish(self, ticket: Ticket, now_s: float) -> None:
        """The request has ended, well or not. Before its first byte: its media are not expected any more, and it was no
        more work than fits into the time that it was there."""
        if ticket.is_finished:
            return
        ticket.is_finished = True
        ticket.pod.in_flight -= 1
        if not ticket.is_computed:
            self._take_work_back(ticket, now_s)
            if ticket.life == ticket.pod.life:
                self.expected.given_up(ticket.pod.slot, ticket.keys)

    def _take_work_back(self, ticket: Ticket, now_s: float) -> None:
        """A request of millions of tokens that is refused at once must not keep others away from its pod."""
        state, there_ms = ticket.pod, (now_s - ticket.sent_s) * 1e3
        state.backlog.add(-max(0.0, ticket.own_ms - there_ms), now_s)
        unspent = max(0.0, ticket.work_ms - there_ms) * self._fading.scale(ticket.sent_s)
        state.work = max(0.0, state.work - unspent)

    def refused(self, uid: str, retry_after_s: float, now_s: float) -> None:
        """The pod answered 429: it gets nothing new until then."""
        state = self._pods.get(uid)
        if state is not None:
            state.saturated_until_s = max(state.saturated_until_s, now_s + retry_after_s)

    def fading_scale(self, now_s: float) -> float:
        """`PodState.work` and `requests` over this are what the pod got from this router lately."""
        return self._fading.scale(now_s)

    # --- metrics

    def stats(self) -> FleetStats:
        states = self._pods.values()
        indexes = (self.chains, self.features, self.texts)
        return FleetStats(
            pods_now=len(states),
            accepting_pods_now=len(self.view.pods),
            in_flight_now=sum(state.in_flight for state in states),
            chains_now=sum(self.chains.num_keys(state.slot) for state in states),
            features_now=sum(self.features.num_keys(state.slot) for state in states),
            expected_now=len(self.expected),
            unknown_key_pods_now=sum(state.scheme is not None and not state.scheme.is_known for state in states),
            links_now=len(self._links),
            snapshots=self._snapshots,
            epochs_lost=self._epochs_lost,
            dropped_keys=sum(index.dropped for index in indexes),
            unknown_key_decisions=self._unknown_key_decisions,
        )

    def answer_age_s(self, uid: str, now_s: float) -> float | None:
        """Seconds since the pod's last cache answer; None before the first."""
        state = self._pods.get(uid)
        return None if state is None or state.answer_s is None else now_s - state.answer_s

    def in_flight(self, uid: str) -> int:
        """Own requests at the pod."""
        state = self._pods.get(uid)
        return state.in_flight if state else 0

    def _rebase(self, now_s: float) -> None:
        factor = self._fading.rebase(now_s)
        if factor != 1.0:
            for state in self._pods.values():
                state.work *= factor
                state.requests *= factor
