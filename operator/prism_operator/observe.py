"""One reading of the cluster for one PrismDeployment. Reads only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from prism_operator.api import (
    CHILD_KINDS,
    CLAIM,
    CONTROLLER_REVISION,
    EVENT,
    NODE,
    POD,
    Api,
    Forbidden,
    NotFound,
    Object,
)
from prism_operator.apply import ChildKey, owner_uid, read_children
from prism_operator.children import names
from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.deployment import ANNOTATION_TEMPLATE_VERSION, LABEL_COMPONENT, LABEL_DEPLOYMENT, Deployment
from prism_operator.model_files import is_complete
from prism_operator.pods import Pod, Trouble, creation_refused, find_trouble, held_back_by
from prism_operator.routers import Routers, routers_of
from prism_operator.snapshot import Serving, lacks_pods

ANNOTATION_GENERATION = "prism-infer.io/generation"
"""On the StatefulSet: the PrismDeployment's generation that it was last applied from."""
API_CHECK_INTERVAL_S = 60.0
NODE_INTERVAL_S = 10.0

T = TypeVar("T")


class ClusterFacts:
    """What is the same for all PrismDeployments, read again when it is old. Safe to use from several threads."""

    def __init__(self, api: Api, clock: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self._missing: _Aged[frozenset[str]] = _Aged(API_CHECK_INTERVAL_S, self._read_missing, clock)
        self._nodes: _Aged[list[Object] | None] = _Aged(NODE_INTERVAL_S, self._read_nodes, clock)

    def missing(self) -> frozenset[str]:
        """Optional kinds that this cluster does not serve."""
        return self._missing.value()

    def served(self) -> frozenset[str]:
        """Group versions of optional kinds that are there."""
        missing = self.missing()
        return frozenset(kind.api_version for kind in CHILD_KINDS if kind.is_optional and kind.kind not in missing)

    def nodes(self) -> list[Object] | None:
        """None where the operator has no right to read nodes, as in one namespace with Roles only."""
        return self._nodes.value()

    def _read_missing(self) -> frozenset[str]:
        return frozenset(kind.kind for kind in CHILD_KINDS if kind.is_optional and not self._api.has(kind))

    def _read_nodes(self) -> list[Object] | None:
        try:
            return self._api.list(NODE)
        except Forbidden:
            return None


class _Aged(Generic[T]):
    """A value that is read again after some seconds."""

    def __init__(self, interval_s: float, read: Callable[[], T], clock: Callable[[], float]) -> None:
        self._interval_s = interval_s
        self._read = read
        self._clock = clock
        self._lock = threading.Lock()
        self._kept: tuple[float, T] | None = None

    def value(self) -> T:
        with self._lock:
            now_s = self._clock()
            if self._kept is None or now_s - self._kept[0] >= self._interval_s:
                self._kept = (now_s, self._read())
            return self._kept[1]


@dataclass(frozen=True, slots=True)
class Observed:
    """What is there now."""

    children: dict[ChildKey, Object]
    pods: Sequence[Pod]
    pod_specs: Sequence[Mapping[str, Any]]
    """Of engine pods and of the StatefulSet's revisions: what may run or come back."""
    nodes: Sequence[Object] | None
    """None: this operator may not read nodes."""
    loader_trouble: Trouble | None
    refusal: Trouble | None = None
    """Why the API server takes no further engine pod."""
    router_pods: Sequence[Pod] = ()
    user_service: Object | None = None
    """What users call, as it was when this was read."""

    @property
    def stateful_set(self) -> Object | None:
        return next((body for (kind, _), body in self.children.items() if kind == "StatefulSet"), None)

    def child(self, kind: str) -> Object | None:
        """The only child of that kind, or None."""
        return next((body for (name, _), body in self.children.items() if name == kind), None)

    @property
    def routers(self) -> Routers:
        return routers_of(self.child("Deployment"), self.router_pods, self.user_service)

    @property
    def serving(self) -> Serving | None:
        body = self.stateful_set
        return None if body is None else serving_of(body)


def serving_of(stateful_set: Mapping[str, Any]) -> Serving:
    metadata, status = stateful_set["metadata"], stateful_set.get("status", {})
    annotations = metadata.get("annotations") or {}
    is_observed = status.get("observedGeneration", 0) >= metadata.get("generation", 1)
    return Serving(
        generation=int(annotations.get(ANNOTATION_GENERATION, 0)),
        replicas=stateful_set["spec"].get("replicas", 1),
        template_version=int(annotations.get(ANNOTATION_TEMPLATE_VERSION, 0)),
        desired_revision=(status.get("updateRevision") or None) if is_observed else None,
    )


def identity(body: Mapping[str, Any]) -> Deployment:
    """Name and UID without the spec, which may be one that this operator cannot read."""
    return Deployment.from_object({**body, "spec": {"model": {"source": {"demo": {}}}}})


def observe(api: Api, facts: ClusterFacts, who: Deployment) -> Observed:
    """Everything that belongs to `who`; not of one instant, but the next pass sees what this one missed."""
    stem = f"{LABEL_DEPLOYMENT}={names.stem(who)}"
    engines = f"{stem},{LABEL_COMPONENT}=engine"
    children = read_children(api, who.namespace, stem, who.uid, facts.missing())
    stateful_set = next((body for (kind, _), body in children.items() if kind == "StatefulSet"), None)
    uid = stateful_set["metadata"]["uid"] if stateful_set is not None else ""
    pod_bodies = [body for body in api.list(POD, who.namespace, engines) if owner_uid(body) == uid]
    pods = [Pod.from_object(body) for body in pod_bodies]
    return Observed(
        children=children,
        pods=[_with_events(api, who.namespace, pod) if pod.is_held_back else pod for pod in pods],
        pod_specs=[*(body["spec"] for body in pod_bodies), *_revision_specs(api, who, engines)],
        nodes=facts.nodes(),
        loader_trouble=_loader_trouble(api, who, children),
        refusal=_engine_refusal(api, stateful_set, pods),
        router_pods=_router_pods(api, who),
        user_service=children.get(("Service", names.service(who))),
    )


def read_claim(api: Api, who: Deployment, spec: PrismDeploymentSpec) -> Object | None:
    """The claim that the model lies in, whoever made it."""
    hub, pvc = spec.model.source.hugging_face, spec.model.source.pvc
    if pvc is None and hub is None:
        return None
    own = hub.storage.claim_name if hub is not None else None
    name = pvc.claim_name if pvc is not None else own or names.model_store(who)
    try:
        return api.get(CLAIM, who.namespace, name)
    except NotFound:
        return None


def _router_pods(api: Api, who: Deployment) -> list[Pod]:
    """By their labels: between them and their Deployment stand ReplicaSets, which the operator need not read."""
    labels = f"{LABEL_DEPLOYMENT}={names.stem(who)},{LABEL_COMPONENT}=router"
    pods = [Pod.from_object(body) for body in api.list(POD, who.namespace, labels)]
    return [_with_events(api, who.namespace, pod) if pod.is_held_back else pod for pod in pods]


def _revision_specs(api: Api, who: Deployment, engines: str) -> list[Mapping[str, Any]]:
    """Pod specs of the StatefulSet's revisions; it forgets all but the last few and those in use."""
    revisions = api.list(CONTROLLER_REVISION, who.namespace, engines)
    return [revision["data"]["spec"]["template"]["spec"] for revision in revisions]


def _with_events(api: Api, namespace: str, pod: Pod) -> Pod:
    """A pod that waits for a volume says so in events only."""
    return replace(pod, trouble=held_back_by(_events(api, namespace, f"involvedObject.uid={pod.uid}")))


def _engine_refusal(api: Api, stateful_set: Object | None, pods: Sequence[Pod]) -> Trouble | None:
    """Asked for only while there are too few pods."""
    if stateful_set is None or not lacks_pods(serving_of(stateful_set), pods):
        return None
    return _refusal(api, stateful_set)


def _refusal(api: Api, workload: Object) -> Trouble | None:
    metadata = workload["metadata"]
    return creation_refused(_events(api, metadata["namespace"], f"involvedObject.uid={metadata['uid']}"))


def _events(api: Api, namespace: str, fields: str) -> list[Object]:
    try:
        return api.list(EVENT, namespace, fields=fields)
    except Forbidden:
        return []


def _loader_trouble(api: Api, who: Deployment, children: Mapping[ChildKey, Object]) -> Trouble | None:
    """Why the newest loader pod does not come to its end, or is not there."""
    jobs = {body["metadata"]["uid"]: body for (kind, _), body in children.items() if kind == "Job"}
    if not jobs:
        return None
    labels = f"{LABEL_DEPLOYMENT}={names.stem(who)},{LABEL_COMPONENT}=loader"
    pods = [body for body in api.list(POD, who.namespace, labels) if owner_uid(body) in jobs]
    newest = max(pods, key=lambda body: str(body["metadata"]["creationTimestamp"]), default=None)
    if newest is None:
        waiting = (body for body in jobs.values() if not is_complete(body))
        return next(filter(None, (_refusal(api, body) for body in waiting)), None)
    pod = Pod.from_object(newest)
    if pod.is_held_back:
        return _with_events(api, who.namespace, pod).trouble
    trouble = find_trouble(newest)
    return trouble if trouble is None else _loaders_words(trouble)


def _loaders_words(trouble: Trouble) -> Trouble:
    """The loader ends with `Reason: sentence`; the reason becomes the condition's."""
    said = trouble.message.partition(": ")[2] or trouble.message
    reason, colon, sentence = said.partition(": ")
    return Trouble(reason, sentence) if colon and reason.isalnum() else trouble
