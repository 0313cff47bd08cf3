"""Pods that the API server does not take: what is read of workloads that stay short of them."""

from __future__ import annotations

from typing import Any

from kubernetes import client

from prism_operator.api import CHILD_KINDS, EVENT, POD, Api, Forbidden, Kind
from prism_operator.crd.status import PrismDeploymentStatus
from prism_operator.deployment import Deployment
from prism_operator.observe import ClusterFacts, Observed, identity, observe
from prism_operator.options import OperatorOptions
from prism_operator.pods import Pod, Trouble
from prism_operator.queue import Key
from prism_operator.reconcile import Reconciler
from prism_operator.rollout import Moves, Phase
from prism_operator.routers import Routers
from prism_operator.snapshot import Serving, Snapshot

REFUSED = 'pods "demo-engine-1" is forbidden: exceeded quota: team'
OWNER = [{"uid": "u", "controller": True, "kind": "PrismDeployment", "name": "demo"}]


class Recorded(Api):
    """Answers lists from what the test says, and knows whose events were asked for."""

    def __init__(self, bodies: dict[str, list[dict[str, Any]]]) -> None:
        super().__init__(client.ApiClient())
        self.bodies = bodies
        self.asked: list[str] = []
        self.may_read_events = True

    def has(self, kind: Kind) -> bool:
        return not kind.is_optional

    def list(self, kind: Kind, namespace: str = "", labels: str = "", fields: str = "") -> list[dict[str, Any]]:
        assert kind in CHILD_KINDS or labels or fields or not namespace
        if kind is EVENT:
            self.asked.append(fields)
            if not self.may_read_events:
                raise Forbidden(403, "Forbidden", "no events")
        found = self.bodies.get(kind.kind, [])
        return [body for body in found if kind is not POD or body["part"] in labels]


def workload(kind: str, uid: str, **fields: Any) -> dict[str, Any]:
    metadata = {"name": f"demo-{uid}", "namespace": "ns", "uid": uid, "ownerReferences": OWNER}
    return {"kind": kind, "metadata": metadata, **fields}


def engine(ordinal: int) -> dict[str, Any]:
    owner = [{"uid": "sts", "controller": True, "kind": "StatefulSet", "name": "demo-engine"}]
    made = {"creationTimestamp": "2026-01-01T00:00:00Z", "ownerReferences": owner}
    return {
        "part": "component=engine",
        "spec": {},
        "metadata": {"name": f"demo-engine-{ordinal}", "uid": f"e{ordinal}", **made},
    }


def failed(reason: str = "FailedCreate") -> dict[str, Any]:
    return {"metadata": {}, "reason": reason, "message": REFUSED, "lastTimestamp": "2026-01-01T00:00:09Z"}


def seen(api: Recorded) -> Observed:
    body = {"metadata": {"name": "demo", "namespace": "ns", "uid": "u"}}
    return observe(api, ClusterFacts(api), identity(body))


def test_a_stateful_set_that_is_short_of_pods_says_why_in_its_events() -> None:
    stateful_set = workload("StatefulSet", "sts", spec={"replicas": 2})
    api = Recorded({"StatefulSet": [stateful_set], "Pod": [engine(0)], "Event": [failed()]})
    assert seen(api).refusal == Trouble("FailedCreate", REFUSED)
    assert api.asked == ["involvedObject.uid=sts"]
    api.bodies["Event"] = [failed("SuccessfulCreate")]
    assert seen(api).refusal is None
    api.may_read_events = False
    assert seen(api).refusal is None


def test_nobody_asks_for_events_of_a_stateful_set_that_has_its_pods() -> None:
    stateful_set = workload("StatefulSet", "sts", spec={"replicas": 2})
    api = Recorded({"StatefulSet": [stateful_set], "Pod": [engine(0), engine(1)], "Event": [failed()]})
    assert seen(api).refusal is None
    assert api.asked == []


def rolling(uid: str, *, refusal: Trouble | None = None) -> tuple[Deployment, Observed]:
    """One of two pods has the old revision; the other one has it, too, or has gone and may not be made again."""
    status = {"observedGeneration": 1, "updateRevision": "new"}
    body = workload("StatefulSet", uid, spec={"replicas": 2}, status=status)
    pods = [Pod(f"{uid}-{number}", f"{uid}{number}", "old", number, is_ready=True) for number in range(2)]
    who = identity({"metadata": {"name": uid, "namespace": "ns", "uid": uid}})
    left = pods if refusal is None else pods[:1]
    return who, Observed({("StatefulSet", uid): body}, left, (), None, None, refusal=refusal)


def test_a_rollout_whose_pods_may_not_be_made_gives_its_turn_away() -> None:
    reconciler = Reconciler(Recorded({}), OperatorOptions(max_concurrent_rollouts=1), b"k" * 32)

    def phase(who: Deployment, observed: Observed) -> Phase:
        return reconciler._next_moves(who, PrismDeploymentStatus(), observed, Routers()).phase

    first, stuck = rolling("a", refusal=Trouble("FailedCreate", REFUSED))
    assert phase(first, stuck) is Phase.WAITING
    assert phase(*rolling("b")) is Phase.ROLLING
    assert phase(*rolling("c")) is Phase.QUEUED, "one at a time"


def test_why_pods_are_missing_is_looked_for_ever_more_seldom() -> None:
    now_s = 1000.0
    options = OperatorOptions()
    reconciler = Reconciler(Recorded({}), options, b"k" * 32, clock=lambda: now_s)
    memory = reconciler._remember(
        Key("ns", "demo"), identity({"metadata": {"name": "d", "namespace": "ns", "uid": "u"}})
    )

    def due_s(num_pods: int, refusal: Trouble | None = None) -> float | None:
        pods = [Pod(f"e-{number}", f"e{number}", "new", number) for number in range(num_pods)]
        moves, serving = Moves(Phase.STARTING, ""), Serving(1, 2, 1, "new")
        snapshot = Snapshot(generation=1, moves=moves, serving=serving, pods=pods, refusal=refusal)
        return reconciler._short_due_s(snapshot, memory)

    waits = []
    for _ in range(8):
        waits.append(wait_s := due_s(1))
        assert wait_s is not None
        assert due_s(1) == wait_s, "a pass for another reason makes it no rarer"
        now_s += wait_s
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (options.eviction_retry_s, options.resync_s)
    assert due_s(2) is None
    assert due_s(1) == options.eviction_retry_s, "from the start for the next that is missing"
    assert due_s(1, Trouble("FailedCreate", REFUSED)) is None


def test_a_loader_that_may_not_be_made_says_why() -> None:
    complete = {"conditions": [{"type": "Complete", "status": "True"}]}
    job = workload("Job", "job", spec={})
    api = Recorded({"Job": [workload("Job", "old", spec={}, status=complete), job], "Event": [failed()]})
    assert seen(api).loader_trouble == Trouble("FailedCreate", REFUSED)
    assert api.asked == ["involvedObject.uid=job"]
    api.bodies["Event"] = []
    assert seen(api).loader_trouble is None
