"""The bound on load: no pod gets much more than its share while another can take the work."""

from __future__ import annotations

import math
from dataclasses import dataclass

from prism_server.router.fleet import Fleet
from prism_server.router.load import FADING_S
from prism_server.router.pod_state import PodState


@dataclass(frozen=True, slots=True)
class PlacementRules:
    """The rules' numbers."""

    load_bound: float = 1.2
    """A pod gets at most this much of the mean load; a little less than the 1.25 that is promised over time."""
    idle_utilisation: float = 0.1
    """A pod whose recent work from this router took less than this part of its time may have more than its share..."""
    idle_requests: int = 4
    """...unless more requests than this are inside."""
    copy_cost: float = 3.0
    """What a copy on one more pod costs, in units of computing it: it also takes room from something else."""
    patience: float = 1.0
    """How much longer a cold key waits at its home than elsewhere, in units of computing it..."""
    patience_ms: float = 100.0
    """...and at least so long: routers that see one another's work a poll later must still agree."""
    least_heat: float = 0.02
    """A key is worth one more copy if each would still get this part of a pod's mean requests."""
    retry_after_s: float = 1.0


DEFAULT_RULES = PlacementRules()


class LoadBound:
    """Loads as parts of what is allowed, at one moment."""

    def __init__(self, fleet: Fleet, rules: PlacementRules, now_s: float) -> None:
        pods = fleet.view.pods
        self._rules = rules
        self._share_of, total_share = fleet.view.shares(now_s)
        self._scale = fleet.fading_scale(now_s)
        self._idle_work = rules.idle_utilisation * FADING_S * 1e3 * self._scale
        part = rules.load_bound / total_share
        self._most_work = part * sum([pod.work for pod in pods])
        self._most_requests = part * sum([pod.requests for pod in pods])
        self._most_inside = part * (sum([pod.in_flight + pod.others_inside for pod in pods]) + 1)

    def ratio(self, pod: PodState, is_hot: bool) -> float:
        """Above 1 the pod gets nothing that another can take.

        Requests for hot keys count by number as well as by work: shed elsewhere they cost little. What is cold stays at
        its home by work alone, else pods with many cheap requests would get nothing new and keep them for ever.

        What a pod did lately does not count while nobody is inside: on slow cards the pictures of a single user are
        more than a share of work, and the next question would be sent away from them, past an idle pod. A pod in its
        slow start has its share only.
        """
        share = self._share_of.get(pod.slot, 1.0)
        recent = 0.0
        if pod.work > self._idle_work * share and (pod.inside or share < 1.0):
            recent = pod.work / (self._most_work * share)
            if is_hot:
                recent = max(recent, pod.requests / (self._most_requests * share))
        most_inside = max(1, math.ceil(max(self._rules.idle_requests, self._most_inside) * share))
        return max(recent, (pod.inside + 1) / most_inside)
