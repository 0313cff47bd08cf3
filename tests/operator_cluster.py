"""A namespace of a real API server for one test, and the part of a kubelet that rollouts look at."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from prism_operator.admin_client import RouterView
from prism_operator.api import (
    CHILD_KINDS,
    CUSTOM_RESOURCE_DEFINITION,
    DEPLOYMENT,
    POD,
    PRISM_DEPLOYMENT,
    STATEFUL_SET,
    Api,
    Kind,
    NotFound,
    Object,
)
from prism_operator.crd.base import GROUP, PLURAL
from prism_operator.crd.schema import crd
from prism_operator.crd.status import Condition, PrismDeploymentStatus
from prism_operator.deployment import LABEL_COMPONENT
from prism_operator.options import OperatorOptions
from prism_operator.pods import REVISION_LABEL, Pod
from prism_operator.reconcile import Reconciler, Requeue
from prism_operator.routers import routers_of
from prism_operator.status import timestamp

NAMESPACE = Kind("v1", "Namespace", "namespaces", is_namespaced=False)
LIMIT_RANGE = Kind("v1", "LimitRange", "limitranges")
BUDGET = Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
MERGE_PATCH = "application/merge-patch+json"
DEMO: dict[str, Any] = {"model": {"source": {"demo": {}}}, "engine": {"device": "cpu"}, "kv": {"pages": 64}}
PATIENCE_S = 200.0
"""For what takes seconds on an idle machine."""
QUIET_PASSES = 2


def install_crd(api: Api) -> None:
    api.apply(CUSTOM_RESOURCE_DEFINITION, "", crd(), force=True)
    until(lambda: api.has(PRISM_DEPLOYMENT), f"{PLURAL}.{GROUP} is served")


def until(is_so: Callable[[], Any], what: str, patience_s: float = PATIENCE_S) -> Any:
    """Polls; returns what `is_so` gave when it held."""
    end_s = time.monotonic() + patience_s
    while not (found := is_so()):
        assert time.monotonic() < end_s, f"not within {patience_s} s: {what}"
        time.sleep(0.05)
    return found


def no_node() -> Object:
    """Makes every pod ask for what no node has, so that no kubelet takes it from the test."""
    amount = {"prism.test/kubelet": "1"}
    limit = {"type": "Container", "default": amount, "defaultRequest": amount}
    return {
        "apiVersion": "v1",
        "kind": "LimitRange",
        "metadata": {"name": "no-node"},
        "spec": {"limits": [limit]},
    }


@contextmanager
def namespace_of(api: Api) -> Iterator[str]:
    name = f"prism-test-{uuid.uuid4().hex[:8]}"
    api.create(NAMESPACE, "", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "default"}}
    api.apply(CHILD_KINDS[0], name, account, force=True)
    api.create(LIMIT_RANGE, name, no_node())
    try:
        yield name
    finally:
        uid = api.get(NAMESPACE, "", name)["metadata"]["uid"]
        api.delete(NAMESPACE, "", name, uid)


def is_held_by_scheduler(body: Object) -> bool:
    """Whether the scheduler has said that no node takes it, and no kubelet has spoken since."""
    return any(c["type"] == "PodScheduled" for c in body["status"].get("conditions") or ())


def is_budget_whole(budget: Object) -> bool:
    """Whether its controller has counted every pod of it as healthy."""
    status = budget.get("status", {})
    is_seen = status.get("observedGeneration", 0) >= budget["metadata"]["generation"]
    is_healthy = status.get("currentHealthy") == status.get("expectedPods")
    return is_seen and is_healthy and not status.get("disruptedPods")


@dataclass
class World:
    """One namespace with one PrismDeployment `demo`, a reconciler with a clock of its own, and its pods' kubelet."""

    api: Api
    namespace: str
    options: OperatorOptions
    now_s: float = 0.0
    reconciler: Reconciler = field(init=False)

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """The operator's memory is gone."""
        self.reconciler = Reconciler(
            self.api, self.options, b"k" * 32, clock=lambda: self.now_s, read_routers=self.read_routers
        )

    def read_routers(self, routers: Sequence[Pod], token: str, port: int) -> list[RouterView]:
        """Routers that nobody runs: each knows every engine at once."""
        engines = frozenset(pod.uid for pod in self.pods())
        return [RouterView(router.uid, engines) for router in routers]

    def put(self, spec: Mapping[str, Any], name: str = "demo") -> Object:
        """Creates it, or replaces its spec as an editor would."""
        body = {
            "apiVersion": PRISM_DEPLOYMENT.api_version,
            "kind": PRISM_DEPLOYMENT.kind,
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": dict(spec),
        }
        query = {"fieldManager": "editor"}
        path = PRISM_DEPLOYMENT.path(self.namespace)
        if self.get(PRISM_DEPLOYMENT, name) is None:
            return self.api.call("POST", path, query, body)
        edit: Any = [{"op": "replace", "path": "/spec", "value": dict(spec)}]  # whatever is written at the same time
        return self.api.call("PATCH", f"{path}/{name}", query, edit, "application/json-patch+json")

    def step(self, name: str = "demo") -> Requeue | None:
        """One pass, some seconds after the one before."""
        self.now_s += 10.0
        return self.reconciler.reconcile(self.namespace, name)

    def settle(self) -> None:
        """Passes, controllers and kubelet until nothing changes: for some passes, since controllers take their time."""
        before: Any = None
        num_quiet, end_s = 0, time.monotonic() + PATIENCE_S
        while num_quiet < QUIET_PASSES:
            assert time.monotonic() < end_s, "it never settles"
            was_observed = self.is_observed()  # before the pass: the last one must have seen all there is to see
            self.step()
            self.run_kubelet()
            after = self.versions()
            num_quiet = num_quiet + 1 if after == before and was_observed else 0
            before = after
            time.sleep(0.1)

    def is_observed(self) -> bool:
        """Whether controllers have seen the last templates, made all pods and counted the ready ones: all of them."""
        return (
            all(routers_of(body, (), None).is_rolled_out for body in self.api.list(DEPLOYMENT, self.namespace))
            and all(self._are_engines_counted(body) for body in self.api.list(STATEFUL_SET, self.namespace))
            and all(is_budget_whole(body) for body in self.api.list(BUDGET, self.namespace))
        )

    def _are_engines_counted(self, stateful_set: Object) -> bool:
        status, replicas = stateful_set.get("status", {}), stateful_set["spec"]["replicas"]
        counts = {status.get(key, 0) for key in ("replicas", "readyReplicas", "availableReplicas")}
        is_seen = status.get("observedGeneration", 0) >= stateful_set["metadata"]["generation"]
        return is_seen and counts == {replicas} and len(self.pods()) == replicas

    def versions(self) -> dict[tuple[str, str], str]:
        """resourceVersion of everything that the operator may write."""
        kinds = [kind for kind in (*CHILD_KINDS, PRISM_DEPLOYMENT) if not kind.is_optional]
        secret = Kind("v1", "Secret", "secrets")
        return {
            (kind.kind, body["metadata"]["name"]): body["metadata"]["resourceVersion"]
            for kind in (*kinds, secret)
            for body in self.api.list(kind, self.namespace)
        }

    def pods(self) -> list[Pod]:
        return [Pod.from_object(body) for body in self.engines()]

    def engines(self) -> list[Object]:
        return self.api.list(POD, self.namespace, f"{LABEL_COMPONENT}=engine")

    def routers(self) -> list[Object]:
        return self.api.list(POD, self.namespace, f"{LABEL_COMPONENT}=router")

    def num_ready(self) -> int:
        return sum(pod.is_ready for pod in self.pods())

    def num_ready_routers(self) -> int:
        """As their Deployment's controller has counted them."""
        bodies = self.api.list(DEPLOYMENT, self.namespace)
        return sum(body.get("status", {}).get("readyReplicas", 0) for body in bodies)

    def run_kubelet(self, bad_images: frozenset[str] = frozenset({"bad:1"}), *, routers: bool = True) -> None:
        """Every pod becomes ready, but for those of a bad image. Without `routers` they do not: a rollout waits for the
        word of ready ones, and nobody answers for them when an operator in a process of its own asks."""
        now = timestamp(datetime.now(UTC))  # without it no router ever becomes available
        for body in [*self.engines(), *(self.routers() if routers else ())]:
            if not is_held_by_scheduler(body):
                continue  # it is ready already, or the scheduler's word, which comes once, would come after ours
            container = body["spec"]["containers"][0]
            is_bad = container["image"] in bad_images
            waiting = {"reason": "ImagePullBackOff", "message": f"no such image: {container['image']}"}
            status = {
                "phase": "Pending" if is_bad else "Running",
                "conditions": [{"type": "Ready", "status": "False" if is_bad else "True", "lastTransitionTime": now}],
                "containerStatuses": [
                    {
                        "name": container["name"],
                        "image": container["image"],
                        "imageID": "",
                        "restartCount": 0,
                        "ready": not is_bad,
                        "state": {"waiting": waiting} if is_bad else {"running": {}},
                    }
                ],
            }
            if not body["status"].get("containerStatuses"):
                self._end_disruption(body["metadata"]["name"])
            self.patch_status(POD, body["metadata"]["name"], status)

    def _end_disruption(self, pod: str) -> None:
        """A pod without a node goes at once when it is evicted. A budget's controller that has not seen it leave takes
        the next of its name for it, and lets none go for two minutes."""
        for budget in self.api.list(BUDGET, self.namespace):
            if pod in (budget.get("status", {}).get("disruptedPods") or {}):
                self.patch_status(BUDGET, budget["metadata"]["name"], {"disruptedPods": {pod: None}})

    def patch_status(self, kind: Kind, name: str, status: Object) -> None:
        """As its controller; lists are replaced. Gone already is well."""
        path = kind.path(self.namespace, name, "status")
        try:
            self.api.call("PATCH", path, None, {"status": status}, MERGE_PATCH)
        except NotFound:
            return

    def get(self, kind: Kind, name: str) -> Object | None:
        try:
            return self.api.get(kind, self.namespace, name)
        except NotFound:
            return None

    def status(self) -> PrismDeploymentStatus:
        return PrismDeploymentStatus.parse(self.api.get(PRISM_DEPLOYMENT, self.namespace, "demo").get("status"))

    def condition(self, kind: str) -> Condition:
        found = self.status().condition(kind)
        assert found is not None, f"no condition {kind}"
        return found

    def is_ready(self) -> bool:
        return self.condition("Ready").status == "True"

    def images(self) -> list[str]:
        return sorted(body["spec"]["containers"][0]["image"] for body in self.engines())

    def revisions(self) -> set[str]:
        return {body["metadata"]["labels"][REVISION_LABEL] for body in self.engines()}
