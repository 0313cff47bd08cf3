"""What may change, and what freezes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from prism_operator.handover import hand_over
from prism_operator.intent import Intent, hold_back, intend
from prism_operator.nodes import NodeFacts
from prism_operator.options import OperatorOptions

CARD = {"nvidia.com/gpu": 1}
SMALL = NodeFacts("small", labels={"nvidia.com/gpu.memory": "8192"}, allocatable=CARD)
LARGE = NodeFacts("large", labels={"nvidia.com/gpu.memory": "143771"}, allocatable=CARD)
SERVED = {"source": {"pvc": {"claimName": "files"}}, "shape": "8b"}


def intent(
    spec: Mapping[str, Any],
    nodes: list[NodeFacts] | None = None,
    live: Mapping[str, Any] | None = None,
    options: OperatorOptions | None = None,
) -> Intent:
    metadata = {"name": "demo", "namespace": "ns", "uid": "u", "generation": 4}
    return intend({"metadata": metadata, "spec": spec}, options or OperatorOptions(), live, nodes, frozenset())


def workload(found: Intent) -> dict[str, Any]:
    assert found.children is not None, found.freeze
    return next(child for child in found.children if child["kind"] == "StatefulSet")


def reason(found: Intent) -> str:
    assert found.children is None
    assert found.freeze is not None
    return found.freeze.reason


def test_a_spec_that_can_be_served_has_children_and_a_plan() -> None:
    found = intent({"model": SERVED}, [LARGE])
    assert found.plan is not None
    assert found.plan.pages is not None
    assert workload(found)["metadata"]["annotations"]["prism-infer.io/generation"] == "4"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({"model": SERVED, "surprise": 1}, "SpecUnreadable"),
        ({"model": SERVED, "engine": {"tensorParallel": 2}}, "TensorParallelUnavailable"),
        ({"model": SERVED}, "DoesNotFit"),
        ({"model": {"source": {"hostPath": {"path": "/m"}}}}, "HostPathNotAllowed"),
        ({"model": SERVED, "gpu": {"memory": "80Gi"}, "engine": {"overrides": {"kv": {"x": 1}}}}, "InvalidSettings"),
    ],
)
def test_a_spec_that_cannot_be_served_has_a_reason_and_no_children(spec: dict[str, Any], expected: str) -> None:
    assert reason(intent(spec, [SMALL])) == expected


def test_tensor_parallelism_has_its_plan_though_no_pods() -> None:
    found = intent({"model": SERVED, "engine": {"tensorParallel": 2}, "gpu": {"memory": "80Gi"}})
    assert reason(found) == "TensorParallelUnavailable"
    assert found.freeze is not None
    assert "this version runs each engine on one card only: set it to 1" in found.freeze.message
    assert found.plan is not None
    assert found.plan.pages is not None


def test_no_fact_about_nodes_touches_a_workload_that_serves() -> None:
    live = workload(intent({"model": SERVED}, [LARGE]))
    now_too_small = intent({"model": SERVED}, [SMALL], live)
    assert workload(now_too_small) == live
    assert now_too_small.plan is not None
    assert now_too_small.plan.status == "False", "the plan says so all the same"
    assert workload(intent({"model": SERVED, "replicas": 5}, [SMALL], live))["spec"]["replicas"] == 5
    assert reason(intent({"model": SERVED, "kv": {"dtype": "bf16"}}, [SMALL], live)) == "DoesNotFit"
    assert workload(intent({"model": SERVED}, None, live)) == live
    assert workload(intent({"model": SERVED}, [NodeFacts("bare")], live)) == live


def test_facts_never_reach_the_workload() -> None:
    assert workload(intent({"model": SERVED}, [LARGE])) == workload(intent({"model": SERVED}, None))


def test_an_operator_upgrade_alone_changes_no_workload() -> None:
    live = workload(intent({"model": SERVED}))
    newer = OperatorOptions(engine_image="prism-server:9.9")
    assert workload(intent({"model": SERVED}, live=live, options=newer)) == live
    edited = workload(intent({"model": SERVED, "kv": {"dtype": "bf16"}}, live=live, options=newer))
    assert edited["spec"]["template"]["spec"]["containers"][0]["image"] == "prism-server:9.9"


HUB = {"source": {"huggingFace": {"repository": "Qwen/Qwen3-VL-8B-Instruct"}}}
OTHER = {"source": {"huggingFace": {"repository": "Qwen/Qwen3-VL-8B-Instruct", "revision": "v2"}}}
Live = dict[tuple[str, str], dict[str, Any]]


def cluster(found: Intent, *, is_loaded: bool) -> Live:
    """What the API server has once `found` is applied; it fills in what nobody asked for."""
    assert found.children is not None
    live = {(child["kind"], child["metadata"]["name"]): dict(child) for child in found.children}
    for (kind, _), body in live.items():
        if kind == "Job" and is_loaded:
            body["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
        if kind == "StatefulSet":
            body["spec"] = {**body["spec"], "persistentVolumeClaimRetentionPolicy": {"whenDeleted": "Retain"}}
    return live


def stateful_set(live: Live) -> dict[str, Any]:
    return live["StatefulSet", "demo-engine"]


def kinds(found: Intent) -> list[str]:
    return [child["kind"] for child in found.children or ()]


def test_no_workload_is_made_before_its_model_is_downloaded() -> None:
    wanted = intent({"model": HUB})
    running = {key: body for key, body in cluster(wanted, is_loaded=False).items() if key[0] != "StatefulSet"}
    for live in ({}, running):
        held = hold_back(wanted, live)
        assert held.awaits_download
        assert kinds(held) == [kind for kind in kinds(wanted) if kind != "StatefulSet"]
    assert hold_back(wanted, cluster(wanted, is_loaded=True)) == wanted


def test_a_workload_keeps_its_template_until_another_model_is_downloaded_and_still_scales() -> None:
    live = cluster(intent({"model": HUB}), is_loaded=True)
    there = stateful_set(live)
    wanted = intent({"model": OTHER, "replicas": 3}, live=there)
    held = hold_back(wanted, live)
    assert held.awaits_download
    assert kinds(held) == kinds(wanted)
    assert workload(held)["spec"] == {**there["spec"], "replicas": 3}
    assert workload(held)["metadata"] == there["metadata"]
    loaded = live | cluster(wanted, is_loaded=True)
    assert hold_back(wanted, loaded) == wanted


def test_a_loader_that_is_made_again_holds_nothing_back_that_stays_as_it_is() -> None:
    live = cluster(intent({"model": HUB}), is_loaded=False)
    wanted = intent({"model": HUB, "replicas": 5}, live=stateful_set(live))
    assert hold_back(wanted, live) == wanted


def test_models_that_need_no_download_wait_for_nothing() -> None:
    wanted = intent({"model": SERVED})
    assert hold_back(wanted, {}) == wanted


def service_and_policy(found: Intent) -> tuple[str, list[Any]]:
    """The part that the users' Service leads to, and who may call the engines."""
    assert found.children is not None
    by_key = {(child["kind"], child["metadata"]["name"]): child["spec"] for child in found.children if "spec" in child}
    part: str = by_key["Service", "demo"]["selector"]["app.kubernetes.io/component"]
    return part, by_key["NetworkPolicy", "demo-engine"]["ingress"]


def before_routers(wanted: Intent) -> Live:
    """What an operator that knew no routers has made."""
    live = {key: body for key, body in cluster(wanted, is_loaded=True).items() if key[0] != "Deployment"}
    selector = {"app.kubernetes.io/component": "engine"}
    live["Service", "demo"] = {**live["Service", "demo"], "spec": {"selector": selector}}
    policy = live["NetworkPolicy", "demo-engine"]
    live["NetworkPolicy", "demo-engine"] = {**policy, "spec": {"ingress": ["everybody"]}}
    return live


def test_a_service_that_leads_to_engines_does_so_until_a_router_is_ready_and_they_let_users_in_as_long() -> None:
    wanted = intent({"model": SERVED})
    live = before_routers(wanted)
    router = ("Deployment", "demo-router")
    assert service_and_policy(hand_over(wanted, live)) == ("engine", ["everybody"])
    live[router] = {"status": {}}
    assert service_and_policy(hand_over(wanted, live)) == ("engine", ["everybody"])
    live[router] = {"status": {"readyReplicas": 1}}
    assert service_and_policy(hand_over(wanted, live)) == ("router", ["everybody"])
    live["Service", "demo"]["spec"]["selector"] = {"app.kubernetes.io/component": "router"}
    assert hand_over(wanted, live) == wanted
    live[router] = {"status": {"readyReplicas": 0}}
    assert hand_over(wanted, live) == wanted, "there is no way back"


def test_a_new_deployment_leads_to_routers_from_the_start() -> None:
    wanted = intent({"model": SERVED})
    assert hand_over(wanted, {}) == wanted
