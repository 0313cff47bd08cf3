"""How pods come to the wanted revision: one at a time, never below the floor, and out of any dead end alone.

The StatefulSet says `OnDelete`: it makes missing pods of its newest revision and replaces nothing by itself, for its
own rolling update waits for ever behind a bad revision (OrderedReady) or takes several pods at once (Parallel). Pure:
pods in, moves out; whoever carries them out comes back until nothing is left to move.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from types import MappingProxyType

from prism_operator.pods import Pod

FLICKER_S = 30.0
"""A pod that is unready for less, without a reason of its own, may be back in a moment."""


class Phase(Enum):
    """Where a rollout stands; the value is the reason that `Progressing` gives."""

    DONE = "RolledOut"
    UNKNOWN = "RevisionUnknown"
    """The StatefulSet's controller has not yet seen the last template."""
    ROLLING = "RollingOut"
    STARTING = "PodsStarting"
    NO_SURGE = "NoSurge"
    """The only pod goes next: there will be a gap."""
    QUEUED = "WaitingForRollouts"
    """Other deployments are being rolled out."""
    WAITING = "WaitingForPods"
    """Old pods remain; the next one goes when all others are ready."""
    ROUTERS = "WaitingForRouters"
    """All others are ready; the next one goes when every router sends requests to them."""


@dataclass(frozen=True, slots=True)
class Moves:
    """What to do now, and what is waited for."""

    phase: Phase
    message: str
    evict: Pod | None = None
    force_delete: Sequence[Pod] = field(default_factory=tuple)

    @property
    def wants_slot(self) -> bool:
        """Whether it counts among the rollouts that run at the same time."""
        return self.phase in (Phase.ROLLING, Phase.WAITING, Phase.NO_SURGE, Phase.QUEUED, Phase.ROUTERS)


def floor_of(replicas: int) -> int:
    """Ready pods that an edit leaves in place: all but the one that is being replaced; with one replica, none."""
    return max(replicas - 1, 0)


def next_moves(
    pods: Sequence[Pod],
    desired_revision: str | None,
    replicas: int,
    *,
    is_announced: bool,
    has_slot: bool,
    unrouted: Mapping[str, str] = MappingProxyType({}),
    silent_router: str = "",
    lost_nodes: Collection[str] = (),
    now_s: float = 0.0,
    lost_node_grace_s: float = 60.0,
) -> Moves:
    """The next step of a rollout.

    `desired_revision` is None while the StatefulSet's controller lags behind. `is_announced`: `Progressing` says
    `NoSurge` for this generation already, so a gap may come. `has_slot`: this deployment may evict ready pods.
    `unrouted`: UIDs of ready pods that some router does not send requests to yet, with a sentence that says so;
    `silent_router`: a sentence on one that nobody knows this of. Pods
    that a scale-down takes away (ordinals from `replicas` on) are the StatefulSet's to remove.
    """
    lost = tuple(
        pod
        for pod in pods
        if pod.node in lost_nodes and pod.gone_by_s is not None and now_s > pod.gone_by_s + lost_node_grace_s
    )
    kept = [pod for pod in pods if pod.ordinal < replicas]
    if desired_revision is None:
        return Moves(Phase.UNKNOWN, "the StatefulSet has not been observed yet", force_delete=lost)
    old = [pod for pod in kept if pod.revision != desired_revision and not pod.is_terminating]
    ready = [pod for pod in kept if pod.is_ready]
    if not old:
        waits = [unrouted[pod.uid] for pod in ready if pod.uid in unrouted]
        is_done = len(ready) == replicas and len(pods) == replicas and not waits
        is_gap = replicas == 1 and is_announced and not ready
        phase = Phase.DONE if is_done else Phase.NO_SURGE if is_gap else Phase.STARTING
        return Moves(phase, "; ".join([f"{len(ready)} of {replicas} pods are ready", *waits[:1]]), force_delete=lost)
    moves = _replace_unready(kept, old, replicas, now_s)
    waits_for = partial(_router_waited_for, kept, unrouted, silent_router)
    moves = moves or _replace_ready(kept, old, replicas, waits_for, is_announced=is_announced, has_slot=has_slot)
    return Moves(moves.phase, moves.message, moves.evict, lost)


def _replace_unready(kept: Sequence[Pod], old: Sequence[Pod], replicas: int, now_s: float) -> Moves | None:
    """Unready pods go first: they serve nobody, so replacing one costs nothing and ends a bad revision.

    While others are missing, too, it has to be sure: a pod whose readiness flickers would have been back before the
    next one is there. None: there is no old unready pod, or one is leaving already.
    """
    unready = [pod for pod in old if not pod.is_ready]
    if not unready or any(pod.is_terminating for pod in kept):
        return None
    victim = max(unready, key=lambda pod: (pod.trouble is not None, pod.ordinal))
    num_ready = sum(pod.is_ready for pod in kept)
    is_dead = victim.trouble is not None or now_s - victim.unready_since_s >= FLICKER_S
    left = f"{len(old)} of {replicas} pods have an old revision; {victim.name} is not ready"
    if is_dead or num_ready in (0, replicas - 1):
        return Moves(Phase.ROLLING, f"{left} and goes first", victim)
    return Moves(Phase.WAITING, f"{left}, as others are not")


def _replace_ready(
    kept: Sequence[Pod],
    old: Sequence[Pod],
    replicas: int,
    waits_for: Callable[[Pod], str],
    *,
    is_announced: bool,
    has_slot: bool,
) -> Moves:
    """One at a time, when all others are ready and have their requests."""
    left = f"{len(old)} of {replicas} pods have an old revision"
    leaving = next((pod for pod in kept if pod.is_terminating), None)
    if leaving is not None:
        return Moves(Phase.ROLLING, f"{left}; {leaving.name} is leaving")
    victim = max(old, key=lambda pod: pod.ordinal)
    num_ready = sum(pod.is_ready for pod in kept)
    if num_ready - 1 < floor_of(replicas):
        return Moves(Phase.WAITING, f"{left}; {num_ready} of {replicas} pods are ready, all must be")
    if router := waits_for(victim):
        return Moves(Phase.ROUTERS, f"{left}; {router}")
    if not has_slot:
        return Moves(Phase.QUEUED, f"{left}; other rollouts go first")
    if replicas == 1 and not is_announced:
        return Moves(Phase.NO_SURGE, f"{victim.name} is the only pod: requests get no answer until the next is ready")
    phase = Phase.NO_SURGE if replicas == 1 else Phase.ROLLING
    return Moves(phase, f"{left}; {victim.name} goes next", victim)


def _router_waited_for(kept: Sequence[Pod], unrouted: Mapping[str, str], silent_router: str, victim: Pod) -> str:
    """Why the victim must stay for now, as far as routers go; empty: it may go. Nobody waits for its own sake."""
    others = [pod for pod in kept if pod is not victim]
    if not others:
        return ""
    return next((unrouted[pod.uid] for pod in others if pod.uid in unrouted), silent_router)
