"""The routers as they are: their Deployment, their pods, and what they say of the engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from prism_operator.admin_client import RouterView
from prism_operator.deployment import LABEL_COMPONENT
from prism_operator.pods import Pod, Trouble, condition

LONGEST_RETRY_S = 60.0


@dataclass(frozen=True, slots=True)
class Routers:
    """`told`: by UID of a ready router, the UIDs of the ready engines that it sends requests to. One that has never
    answered the operator is not among them."""

    replicas: int = 0
    """Wanted; 0 while there is no Deployment."""
    is_rolled_out: bool = False
    """All are of the newest template and available."""
    pods: Sequence[Pod] = ()
    told: Mapping[str, frozenset[str]] = field(default_factory=dict)
    is_bypassed: bool = False
    """The Service leads to engines still, as one does that was made before there were routers."""
    refusal: Trouble | None = None
    """Why the API server takes no further router pod: a quota, an admission rule."""

    @property
    def ready(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.is_ready]

    @property
    def floor(self) -> int:
        """Ready routers that are enough: all but one, and one at least."""
        return max(self.replicas - 1, 1)

    def reach(self, engine: Pod) -> bool:
        """Whether some ready router sends requests to it; the word of one that nobody can ask is not needed."""
        return self.is_bypassed or any(engine.uid in self.told.get(router.uid, {engine.uid}) for router in self.ready)

    @property
    def silent(self) -> str:
        """The first ready router that has never answered, in a sentence; empty: there is none."""
        names = (router.name for router in self.ready if router.uid not in self.told)
        return next((f"router {name} does not answer the operator" for name in names), "")

    def unrouted(self, engines: Iterable[Pod]) -> dict[str, str]:
        """UIDs of those ready engines that some router has not named, with a sentence that names the first such."""
        found: dict[str, str] = {}
        for engine, router in product((engine for engine in engines if engine.is_ready), self.ready):
            if engine.uid not in self.told.get(router.uid, {engine.uid}):
                found.setdefault(engine.uid, f"router {router.name} does not know {engine.name} yet")
        return found


def leads_to_engines(service: Mapping[str, Any] | None) -> bool:
    """Whether the users' Service is one that was made before there were routers."""
    selector = (service or {}).get("spec", {}).get("selector") or {}
    return bool(selector.get(LABEL_COMPONENT) == "engine")


def routers_of(body: Mapping[str, Any] | None, pods: Sequence[Pod], service: Mapping[str, Any] | None) -> Routers:
    """`body` is the Deployment and `service` what users call, if they are there."""
    is_bypassed = leads_to_engines(service)
    if body is None:
        return Routers(pods=pods, is_bypassed=is_bypassed)
    replicas, status = body["spec"].get("replicas", 1), body.get("status", {})
    is_observed = status.get("observedGeneration", 0) >= body["metadata"].get("generation", 1)
    counts = {status.get(key, 0) for key in ("replicas", "updatedReplicas", "availableReplicas")}
    if sum(pod.is_ready for pod in pods) >= replicas:
        # what has ended for good is left where it is, beside the one that was made in its place
        pods = [pod for pod in pods if not pod.is_finished]
    failure = condition(body, "ReplicaFailure")
    refusal = None
    if failure is not None and failure["status"] == "True":
        refusal = Trouble(failure.get("reason", "FailedCreate"), failure.get("message", ""))
    is_rolled_out = is_observed and counts == {replicas}
    return Routers(replicas, is_rolled_out, pods, is_bypassed=is_bypassed, refusal=refusal)


class RouterViews:
    """What one process has heard from one deployment's routers. `read` leaves out those that do not answer.

    What a router has once confirmed stands as long as both pods are ready, so that routers are asked about news only
    and a lost answer takes nothing back.
    """

    def __init__(self, read: Callable[[Sequence[Pod]], list[RouterView]], retry_s: float) -> None:
        self._read = read
        self._first_retry_s = retry_s
        self._told: dict[str, frozenset[str]] = {}
        self._num_waits = 0
        self.retry_s: float | None = None
        """When to ask again; None when there is nothing left to hear."""

    def of(self, routers: Sequence[Pod], engines: Sequence[Pod]) -> dict[str, frozenset[str]]:
        """By UID of a ready router that has answered: UIDs of the ready engines that it knows."""
        wanted = frozenset(engine.uid for engine in engines if engine.is_ready)
        ready = [router for router in routers if router.is_ready]
        self._told = {router.uid: self._told[router.uid] & wanted for router in ready if router.uid in self._told}
        behind = [router for router in ready if self._told.get(router.uid) != wanted]
        for view in self._read(behind) if behind else ():
            self._told[view.router_uid] = self._told.get(view.router_uid, frozenset()) | (view.engine_uids & wanted)
        is_complete = all(self._told.get(router.uid) == wanted for router in ready)
        self._num_waits = 0 if is_complete else self._num_waits + 1
        pause_s = self._first_retry_s * 2.0 ** min(self._num_waits - 1, 16)
        self.retry_s = None if is_complete else min(pause_s, LONGEST_RETRY_S)
        return dict(self._told)
