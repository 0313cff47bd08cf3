"""One pass: read everything, decide, apply, roll one step, say how it stands. Level-based: why it runs is no matter."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial

from prism_operator import announce
from prism_operator.admin_client import RouterView, admin_token, read_capacities, read_router_views, read_starts
from prism_operator.api import (
    JOB,
    POD,
    PRISM_DEPLOYMENT,
    SECRET,
    Api,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    Object,
)
from prism_operator.apply import apply_children, prune
from prism_operator.children import config, labels, missing_apis, names
from prism_operator.crd.status import PrismDeploymentStatus
from prism_operator.deployment import Deployment, class_of
from prism_operator.dry_run import checked, pod_spec
from prism_operator.handover import hand_over
from prism_operator.intent import Intent, hold_back, intend, keep_download
from prism_operator.measures import Measures
from prism_operator.model_files import is_lost
from prism_operator.nodes import NodeFacts
from prism_operator.observe import ClusterFacts, Observed, identity, observe, read_claim
from prism_operator.options import OperatorOptions
from prism_operator.pods import Pod, lost_nodes
from prism_operator.queue import Key
from prism_operator.rollout import FLICKER_S, Moves, Phase, next_moves
from prism_operator.routers import Routers, RouterViews
from prism_operator.slots import RolloutSlots
from prism_operator.snapshot import Problem, Snapshot, lacks_pods
from prism_operator.starts import Starts
from prism_operator.status import is_due, next_status, transitions
from prism_operator.tokens import token_secret

log = logging.getLogger(__name__)

ROUTERS_RETRY_S = 0.5
"""A router takes a pod in within its next poll."""
AUTOSCALERS = frozenset({"HorizontalPodAutoscaler", "ScaledObject"})
ReadRouters = Callable[[Sequence[Pod], str, int], list[RouterView]]


@dataclass(frozen=True, slots=True)
class Requeue:
    """Come back after so many seconds, whatever happens in between."""

    after_s: float


@dataclass(slots=True)
class _Memory:
    """What one process remembers of a deployment; losing it costs a few calls and nothing else."""

    uid: str
    measures: Measures
    starts: Starts
    views: RouterViews
    status_written_s: float = float("-inf")
    token_applied_s: float = float("-inf")
    short_since_s: float | None = None
    """Since when pods are missing and nothing says why."""
    refused_since_s: float | None = None
    """Since when the API server lets the next pod of a rollout not be evicted."""
    refusal: str = ""
    """Its last words on that."""


class Reconciler:
    """`key` makes the admin tokens. Passes for different deployments may overlap; two for one may not."""

    def __init__(
        self,
        api: Api,
        options: OperatorOptions,
        key: bytes,
        clock: Callable[[], float] = time.monotonic,
        read_routers: ReadRouters = read_router_views,
    ) -> None:
        self._api = api
        self._options = options
        self._key = key
        self._clock = clock
        self._read_routers = read_routers
        self._facts = ClusterFacts(api, clock)
        self._slots = RolloutSlots(options.max_concurrent_rollouts)
        self._memory: dict[Key, _Memory] = {}

    def reconcile(self, namespace: str, name: str) -> Requeue | None:
        """One pass over one PrismDeployment. Raises ApiError when the API server fails; another pass repairs that."""
        key = Key(namespace, name)
        try:
            body = self._api.get(PRISM_DEPLOYMENT, namespace, name)
        except NotFound:
            self._forget(key)
            return None
        who = identity(body)
        if body["metadata"].get("deletionTimestamp") or class_of(body) != self._options.operator_class:
            self._forget(key)
            return None
        memory = self._remember(key, who)
        before = PrismDeploymentStatus.parse(body.get("status"))
        observed = observe(self._api, self._facts, who)
        self._forget_lost_downloads(observed)
        intent = checked(self._api, self._intend(body, observed, before), observed.children)
        for settle in (keep_download, hold_back, hand_over):
            intent = settle(intent, observed.children)
        if intent.deployment is not None:
            stall_s = intent.deployment.spec.startup.stall_seconds
            observed = replace(observed, pods=memory.starts.judged(observed.pods, stall_s))
        problems = self._carry_out(who, intent, observed, memory)
        routers = replace(observed.routers, told=memory.views.of(observed.router_pods, observed.pods))
        moves = self._with_refusal(self._next_moves(who, before, observed, routers), memory)
        snapshot = self._snapshot(who, intent, observed, routers, problems, moves, memory)
        status_due_s = self._say(body, before, snapshot, memory)
        self._move(who, moves, memory)
        short_due_s = self._short_due_s(snapshot, memory)
        return self._requeue(
            snapshot, status_due_s, short_due_s, memory.measures.retry_s, memory.starts.retry_s, memory.views.retry_s
        )

    def _remember(self, key: Key, who: Deployment) -> _Memory:
        memory = self._memory.get(key)
        if memory is not None and memory.uid == who.uid:
            return memory
        self._forget(key)
        options = self._options
        token = admin_token(self._key, who.uid)
        read = partial(read_capacities, token=token, port=names.ADMIN_PORT)
        measures = Measures(read, options.status_min_interval_s, options.eviction_retry_s, self._clock)
        starts = Starts(partial(read_starts, port=names.API_PORT), self._clock)
        views = RouterViews(lambda pods: self._read_routers(pods, token, names.ADMIN_PORT), ROUTERS_RETRY_S)
        self._memory[key] = _Memory(who.uid, measures, starts, views)
        return self._memory[key]

    def _forget(self, key: Key) -> None:
        memory = self._memory.pop(key, None)
        if memory is not None:
            self._slots.release(memory.uid)

    def _intend(self, body: Object, observed: Observed, before: PrismDeploymentStatus) -> Intent:
        nodes = None if observed.nodes is None else [NodeFacts.from_object(node) for node in observed.nodes]
        apis, routers = self._facts.served(), observed.child("Deployment")
        intent = intend(body, self._options, observed.stateful_set, nodes, apis, routers)
        if before.selector is not None or intent.children is None:
            return intent
        # an autoscaler that finds no selector in the status complains; it is made once there is one
        early = AUTOSCALERS - {kind for kind, _ in observed.children}
        return replace(intent, children=[child for child in intent.children if child["kind"] not in early])

    def _forget_lost_downloads(self, observed: Observed) -> None:
        """Their Jobs are made again, for the claim that is there now."""
        claim = observed.child("PersistentVolumeClaim")
        lost = [body for (kind, _), body in observed.children.items() if kind == "Job" and is_lost(body, claim)]
        for job in lost:
            metadata = job["metadata"]
            log.warning("%s/%s has loaded into a claim that is gone", metadata["namespace"], metadata["name"])
            self._api.delete(JOB, metadata["namespace"], metadata["name"], metadata["uid"])
            del observed.children["Job", metadata["name"]]

    def _carry_out(self, who: Deployment, intent: Intent, observed: Observed, memory: _Memory) -> list[Problem]:
        options = self._options
        problems = [] if intent.children is None and observed.serving is None else self._apply_token(who, memory)
        if intent.children is None:
            return problems
        # KEDA takes no ScaledObject beside an HPA, and two that scale would fight: the old one goes first
        left = AUTOSCALERS - {child["kind"] for child in intent.children}
        old = {key: observed.children.pop(key) for key in [*observed.children] if key[0] in left}
        prune(self._api, intent.children, old, in_use=())
        problems += apply_children(self._api, intent.children, observed.children, who.uid, options.operator_class)
        if not problems:
            in_use = [*observed.pod_specs, *(pod_spec(child) for child in intent.children)]
            prune(self._api, intent.children, observed.children, in_use)
        return problems

    def _apply_token(self, who: Deployment, memory: _Memory) -> list[Problem]:
        """Nobody tells the operator that this Secret is gone, so it is applied again and again; no change, no write."""
        if self._clock() - memory.token_applied_s < self._options.resync_s:
            return []
        secret = token_secret(who, self._key, self._options.operator_class)
        try:
            self._api.apply(SECRET, who.namespace, secret)
        except (Conflict, Invalid, Forbidden) as error:
            problem = Problem(isinstance(error, Conflict), f"Secret {names.admin_token(who)}", error.message)
            return [problem]
        memory.token_applied_s = self._clock()
        return []

    def _next_moves(
        self, who: Deployment, before: PrismDeploymentStatus, observed: Observed, routers: Routers
    ) -> Moves:
        serving = observed.serving
        desired = serving.desired_revision if serving else None
        progress = before.condition("Progressing")
        is_announced = (
            progress is not None
            and progress.reason == Phase.NO_SURGE.value
            and progress.observed_generation == who.generation
        )
        plan = partial(
            next_moves,
            observed.pods,
            desired,
            serving.replicas if serving else 0,
            is_announced=is_announced,
            unrouted=routers.unrouted(observed.pods),
            silent_router=routers.silent,
            lost_nodes=lost_nodes(observed.nodes or ()),
            now_s=time.time(),
            lost_node_grace_s=self._options.lost_node_grace_s,
        )
        moves = plan(has_slot=True)
        if moves.wants_slot and not self._slots.take(who.uid):
            moves = plan(has_slot=False)
        is_stuck = observed.refusal is not None or any(
            pod.trouble is not None and not pod.is_ready and pod.revision == desired for pod in observed.pods
        )
        if not moves.wants_slot or is_stuck:
            self._slots.release(who.uid)
        return moves

    def _with_refusal(self, moves: Moves, memory: _Memory) -> Moves:
        """Says why nothing goes on when the eviction has been refused for a while; a budget is slow to count anew."""
        since_s = memory.refused_since_s
        if moves.evict is None or since_s is None or self._clock() - since_s < FLICKER_S:
            return moves
        return replace(moves, message=f"{moves.message}; its eviction is refused: {memory.refusal}")

    def _move(self, who: Deployment, moves: Moves, memory: _Memory) -> None:
        """After the status: with one replica it has to tell of the gap before there is one."""
        for pod in moves.force_delete:
            log.warning("%s/%s is stuck on lost node %s: force-deleting it", who.namespace, pod.name, pod.node)
            self._api.delete(POD, who.namespace, pod.name, pod.uid, grace_s=0)
        since_s, memory.refused_since_s = memory.refused_since_s, None
        if moves.evict is None:
            return
        log.info("evicting %s/%s for the rollout", who.namespace, moves.evict.name)
        try:
            self._api.evict(who.namespace, moves.evict.name, moves.evict.uid)
        except ApiError as error:
            if not error.status:
                raise
            # a budget with nothing left, two budgets for one pod, an admission rule
            memory.refused_since_s = self._clock() if since_s is None else since_s
            memory.refusal = "; ".join([error.message, *error.causes])
            log.info("%s/%s may not be evicted: %s", who.namespace, moves.evict.name, memory.refusal)

    def _snapshot(
        self,
        who: Deployment,
        intent: Intent,
        observed: Observed,
        routers: Routers,
        problems: Sequence[Problem],
        moves: Moves,
        memory: _Memory,
    ) -> Snapshot:
        spec = intent.deployment.spec if intent.deployment else None
        facts: dict[str, str] = {
            "selector": ",".join(f"{key}={value}" for key, value in labels.selector(who, "engine").items())
        }
        if spec is not None:
            port = "" if spec.service.port == 80 else f":{spec.service.port}"
            facts["url"] = f"http://{names.service(who)}.{who.namespace}.svc{port}"
            facts["model"] = config.served_name(spec)
        absent = missing_apis(intent.deployment, self._facts.served()) if intent.deployment else []
        return Snapshot(
            generation=who.generation,
            moves=moves,
            spec=spec,
            serving=observed.serving,
            pods=observed.pods,
            refusal=observed.refusal,
            routers=routers,
            freeze=intent.freeze,
            plan=intent.plan,
            problems=problems,
            missing_apis=absent,
            capacities=memory.measures.of(observed.pods),
            claim=read_claim(self._api, who, spec) if spec is not None else None,
            awaits_download=intent.awaits_download,
            loader_job=_loader_job(intent, observed),
            loader_trouble=observed.loader_trouble,
            autoscaler=observed.child("HorizontalPodAutoscaler") or observed.child("ScaledObject"),
            inference_pool=observed.child("InferencePool"),
            is_settings_checked=spec is None or config.is_checked(spec),
            facts=facts,
        )

    def _say(self, body: Object, before: PrismDeploymentStatus, snapshot: Snapshot, memory: _Memory) -> float | None:
        """Writes the status if it says something new. Returns the seconds until what is held back may be written."""
        after = next_status(snapshot, before, datetime.now(UTC))
        since_s = self._clock() - memory.status_written_s
        if not is_due(before, after, since_s, self._options.status_min_interval_s):
            return None if before == after else self._options.status_min_interval_s - since_s
        metadata = body["metadata"]
        said = after.to_object()
        gone = dict.fromkeys((body.get("status") or {}).keys() - said.keys())
        try:
            self._api.merge_status(PRISM_DEPLOYMENT, metadata["namespace"], metadata["name"], said | gone)
        except NotFound:
            return None
        memory.status_written_s = self._clock()
        announce.transitions(self._api, body, transitions(before.conditions, after.conditions), self._options)
        return None

    def _short_due_s(self, snapshot: Snapshot, memory: _Memory) -> float | None:
        """When to look again for the event that says why pods are missing, of which no watch tells: ever more seldom,
        since a controller that does not work may never post one. None while none are, or the reason is known."""
        serving = snapshot.serving
        if serving is None or snapshot.refusal is not None or not lacks_pods(serving, snapshot.pods):
            memory.short_since_s = None
            return None
        now_s = self._clock()
        if memory.short_since_s is None:
            memory.short_since_s = now_s
        return min(max(now_s - memory.short_since_s, self._options.eviction_retry_s), self._options.resync_s)

    def _requeue(self, snapshot: Snapshot, *due_s: float | None) -> Requeue | None:
        options = self._options
        waits = [due for due in due_s if due is not None]
        if snapshot.moves.wants_slot:
            waits.append(options.eviction_retry_s)
        if any(pod.is_terminating for pod in snapshot.pods):
            waits.append(options.lost_node_grace_s)
        return Requeue(max(min(waits), 0.1)) if waits else None


def _loader_job(intent: Intent, observed: Observed) -> Object | None:
    """Of this spec; one of the spec before may still be there."""
    wanted = next((child["metadata"]["name"] for child in intent.children or () if child["kind"] == "Job"), None)
    return observed.child("Job") if wanted is None else observed.children.get(("Job", wanted))
