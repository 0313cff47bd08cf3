"""The pods that take new requests, laid out for placement."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from prism_server.identity import Digest
from prism_server.router.pod_state import PodState
from prism_server.router.pods import KeyScheme
from prism_server.router.rendezvous import Rendezvous

LEAST_SHARE = 0.1
"""Of a whole pod's work, for one that has just become ready: its caches are empty, its kernels not warm."""
TICK_S = 0.25


class SlowStart:
    """Shares of pods by their age: from `LEAST_SHARE` to 1 within `duration_s`, in steps of `TICK_S`."""

    def __init__(self, ready_since_s: Mapping[int, float], duration_s: float) -> None:
        self._ready_since_s = ready_since_s
        self._duration_s = duration_s
        self._ends_s = max(ready_since_s.values(), default=float("-inf")) + duration_s
        self._whole: tuple[dict[int, float], float] = ({}, float(len(ready_since_s)))
        self._last: tuple[int, tuple[dict[int, float], float]] | None = None

    def shares(self, now_s: float) -> tuple[Mapping[int, float], float]:
        """By slot, shares below 1; and the sum of all."""
        if now_s >= self._ends_s:
            return self._whole
        tick = int(now_s / TICK_S)
        if self._last is None or self._last[0] != tick:
            shares = {slot: self._share(tick * TICK_S - since_s) for slot, since_s in self._ready_since_s.items()}
            self._last = tick, (shares, sum(shares.values()))
        return self._last[1]

    def _share(self, age_s: float) -> float:
        return min(1.0, LEAST_SHARE + (1.0 - LEAST_SHARE) * max(0.0, age_s) / self._duration_s)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """Holds until membership changes. The order is that of the names, whatever order the pods came in."""

    pods: tuple[PodState, ...]
    rendezvous: Rendezvous
    schemes: tuple[KeyScheme, ...]
    scheme_bits: Mapping[KeyScheme, int]
    """Slots of the pods of each computable scheme."""
    slow_start: SlowStart

    def shares(self, now_s: float) -> tuple[Mapping[int, float], float]:
        """By slot, the share of work of pods that do not have a whole one yet; and the sum of all pods' shares."""
        return self.slow_start.shares(now_s)

    @classmethod
    def of(cls, states: Iterable[PodState], slow_start_s: float) -> View:
        all_states = list(states)
        pods = tuple(sorted((s for s in all_states if s.is_accepting), key=lambda state: (state.name, state.uid)))
        bits: dict[KeyScheme, int] = {}
        for state in pods:
            if state.scheme is not None and state.scheme.is_known:
                bits[state.scheme] = bits.get(state.scheme, 0) | 1 << state.slot
        pages = [state.load.total_pages for state in pods]
        weights = [float(count) for count in pages] if all(pages) else [1.0] * len(pods)
        return cls(
            pods=pods,
            rendezvous=Rendezvous([state.name for state in pods], weights),
            schemes=tuple(sorted({s.scheme for s in all_states if s.scheme and s.scheme.is_known}, key=_scheme_order)),
            scheme_bits=bits,
            slow_start=SlowStart({state.slot: state.ready_since_s for state in pods}, slow_start_s),
        )


def _scheme_order(scheme: KeyScheme) -> tuple[Digest, str]:
    return scheme.namespace, scheme.layout
