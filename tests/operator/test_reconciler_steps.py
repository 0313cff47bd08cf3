"""Single steps of a pass, with an API server that says what the test wants."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from kubernetes import client

from prism_operator.api import Api, ApiError, Forbidden, Kind, NotFound, Object, TooManyRequests
from prism_operator.crd.status import PrismDeploymentStatus
from prism_operator.observe import Observed, identity
from prism_operator.options import OperatorOptions
from prism_operator.pods import Pod, Trouble
from prism_operator.queue import Key
from prism_operator.reconcile import Reconciler
from prism_operator.rollout import FLICKER_S, Moves, Phase
from prism_operator.snapshot import Problem, Snapshot
from prism_operator.status import next_status

NOW = datetime(2026, 1, 2, tzinfo=UTC)
SELECTED = PrismDeploymentStatus(selector="a=b")


class Scripted(Api):
    """Keeps what it is given, notes what is asked of it."""

    def __init__(self) -> None:
        super().__init__(client.ApiClient())
        self.calls: list[tuple[str, str, str]] = []
        self.there: dict[tuple[str, str], Object] = {}
        self.refusal: ApiError | None = None

    def has(self, kind: Kind) -> bool:
        return True

    def get(self, kind: Kind, namespace: str, name: str) -> Object:
        if (kind.kind, name) not in self.there:
            raise NotFound(404, "NotFound", name)
        return self.there[kind.kind, name]

    def apply(self, kind: Kind, namespace: str, body: Object, *, force: bool = False, dry_run: bool = False) -> Object:
        if kind.kind == "ScaledObject" and any(name == "HorizontalPodAutoscaler" for name, _ in self.there):
            raise Forbidden(403, "Forbidden", "the workload is already managed by the hpa")  # KEDA's admission webhook
        self.calls.append(("apply", kind.kind, body["metadata"]["name"]))
        self.there[kind.kind, body["metadata"]["name"]] = body
        return body

    def delete(self, kind: Kind, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> None:
        self.calls.append(("delete", kind.kind, name))
        self.there.pop((kind.kind, name), None)

    def evict(self, namespace: str, name: str, uid: str) -> None:
        self.calls.append(("evict", "Pod", name))
        if self.refusal is not None:
            raise self.refusal


class Steps:
    """A reconciler of one PrismDeployment, and its clock."""

    def __init__(self) -> None:
        self.api, self.now_s = Scripted(), 1000.0
        self.reconciler = Reconciler(self.api, OperatorOptions(), b"k" * 32, clock=lambda: self.now_s)
        self.who = identity({"metadata": {"name": "demo", "namespace": "ns", "uid": "u"}})
        self.memory = self.reconciler._remember(Key("ns", "demo"), self.who)

    def observed(self) -> Observed:
        uids = {key: {**body, "metadata": {**body["metadata"], "uid": "x"}} for key, body in self.api.there.items()}
        return Observed(uids, (), (), None, None)

    def carry_out(self, spec: dict[str, Any], before: PrismDeploymentStatus = SELECTED) -> list[Problem]:
        metadata = {"name": "demo", "namespace": "ns", "uid": "u", "generation": 1}
        body = {"metadata": metadata, "spec": {"model": {"source": {"demo": {}}}, "engine": {"device": "cpu"}, **spec}}
        observed = self.observed()
        intent = self.reconciler._intend(body, observed, before)
        return self.reconciler._carry_out(self.who, intent, observed, self.memory)

    def scalers(self) -> list[str]:
        return [kind for kind, _ in self.api.there if kind in ("HorizontalPodAutoscaler", "ScaledObject")]

    def move(self, moves: Moves) -> str:
        """Carries them out; returns what the status says of them."""
        said = self.reconciler._with_refusal(moves, self.memory).message
        self.reconciler._move(self.who, moves, self.memory)
        return said


def test_an_autoscaler_of_another_kind_takes_the_place_of_the_one_before() -> None:
    steps = Steps()
    for kind, made in (
        ("HPA", "HorizontalPodAutoscaler"),
        ("KEDA", "ScaledObject"),
        ("HPA", "HorizontalPodAutoscaler"),
    ):
        assert steps.carry_out({"autoscaling": {"kind": kind}}) == []
        assert steps.scalers() == [made]
    steps.api.calls.clear()
    assert steps.carry_out({}) == []
    assert steps.scalers() == []
    assert [call for call in steps.api.calls if call[0] == "delete"] == [("delete", "HorizontalPodAutoscaler", "demo")]


def test_an_autoscaler_stays_when_a_status_is_lost() -> None:
    """A status is no part of a backup: what was restored without one goes on as it was."""
    steps, scaled = Steps(), {"autoscaling": {"kind": "HPA"}}
    steps.carry_out(scaled, before=PrismDeploymentStatus())
    assert steps.scalers() == [], "it would find no selector"
    steps.carry_out(scaled)
    steps.api.calls.clear()
    steps.carry_out(scaled, before=PrismDeploymentStatus())
    assert not [call for call in steps.api.calls if call[0] == "delete"]
    assert steps.scalers() == ["HorizontalPodAutoscaler"]


VICTIM = Pod("demo-engine-0", "u0", "old", 0, is_ready=True)
EVICT = Moves(Phase.ROLLING, "demo-engine-0 goes next", VICTIM)
BUDGETS = "This pod has more than one PodDisruptionBudget, which the eviction subresource does not support."


def test_an_eviction_that_is_refused_for_long_is_said_in_the_rollouts_message() -> None:
    steps = Steps()
    steps.api.refusal = TooManyRequests(429, "", "it would violate the budget", ["demo-engine needs 1 healthy pod"])
    assert steps.move(EVICT) == EVICT.message
    steps.now_s += FLICKER_S - 1
    assert steps.move(EVICT) == EVICT.message, "a budget is counted anew in a moment"
    steps.api.refusal = ApiError(500, "InternalError", BUDGETS)
    steps.now_s += 1
    assert steps.move(EVICT).endswith(
        "its eviction is refused: it would violate the budget; demo-engine needs 1 healthy pod"
    )
    assert steps.move(EVICT) == f"{EVICT.message}; its eviction is refused: {BUDGETS}"
    steps.api.refusal = None
    steps.move(EVICT)
    assert steps.move(EVICT) == EVICT.message
    assert steps.api.calls == [("evict", "Pod", "demo-engine-0")] * 6


def test_a_rollout_that_moves_on_forgets_an_old_refusal() -> None:
    steps = Steps()
    steps.api.refusal = TooManyRequests(429, "", "no")
    steps.move(EVICT)
    steps.now_s += FLICKER_S
    assert steps.move(replace(EVICT, evict=None)) == EVICT.message
    assert steps.move(EVICT) == EVICT.message


def test_a_download_that_went_with_its_claim_is_made_again() -> None:
    steps = Steps()
    volumes = [{"name": "model", "persistentVolumeClaim": {"claimName": "demo-models"}}]
    job = {
        "kind": "Job",
        "metadata": {"name": "demo-loader-1", "namespace": "ns", "uid": "j"},
        "spec": {"template": {"spec": {"volumes": volumes}}},
        "status": {
            "conditions": [{"type": "Complete", "status": "True"}],
            "completionTime": "2026-01-01T00:00:00Z",
        },
    }
    claim = {"metadata": {"name": "demo-models", "creationTimestamp": "2026-01-02T00:00:00Z"}}
    children = {("Job", "demo-loader-1"): job, ("PersistentVolumeClaim", "demo-models"): claim}
    steps.reconciler._forget_lost_downloads(Observed(children, (), (), None, None))
    assert steps.api.calls == [("delete", "Job", "demo-loader-1")]
    assert [*children] == [("PersistentVolumeClaim", "demo-models")]


def status_of(**fields: Any) -> PrismDeploymentStatus:
    return next_status(Snapshot(1, Moves(Phase.STARTING, ""), **fields), PrismDeploymentStatus(), NOW)


def test_no_word_of_others_and_no_long_name_stands_in_the_way_of_a_status() -> None:
    for reason, expected in (
        ("404: x", "x"),
        ("_odd", "odd"),
        ("-1st", "st"),
        ("??", "Unknown"),
        ("Eviction", "Eviction"),
    ):
        status = status_of(pods=[Pod("e-0", "u0", "r", 0, trouble=Trouble(reason, "why"))])
        stalled = status.condition("Stalled")
        assert stalled is not None
        assert (stalled.status, stalled.reason) == ("True", expected)
    assert status_of(facts={"model": "m" * 400}).model == "m" * 253
    assert status_of().model is None
