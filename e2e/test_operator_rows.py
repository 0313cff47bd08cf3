"""What the operator does for objects, seen on the API server: no engine has to run for it, but for the shared one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from e2e.cluster.layout import REGISTRY
from e2e.harness import Cluster, Object, eventually
from e2e.prism import Deployed, new_namespace, prism_deployment

ABSENT_IMAGE = f"{REGISTRY}/prism-server-cpu:absent"
KINDS = (
    "serviceaccounts,roles,rolebindings,configmaps,secrets,services,statefulsets,deployments,poddisruptionbudgets,"
    "networkpolicies,hpa"
)
"""Everything that an operator makes for a deployment with a source that needs no download."""
RESYNCS_S = 8
"""Four of the operator's, which are short in tests (`QUICK`)."""


def children(deployed: Deployed) -> dict[tuple[str, str], Object]:
    """(kind, name) to metadata of all that the operator made for it; the disruption budget's status is not its own."""
    label = f"prism-infer.io/deployment={deployed.name}"
    found = deployed.cluster.list(KINDS, deployed.namespace, label)
    return {(body["kind"], body["metadata"]["name"]): body["metadata"] for body in found}


def versions(deployed: Deployed) -> dict[tuple[str, str], str]:
    """resourceVersions of the deployment and its children."""
    own = {("PrismDeployment", deployed.name): deployed.read()["metadata"]["resourceVersion"]}
    return own | {key: metadata["resourceVersion"] for key, metadata in children(deployed).items()}


@pytest.fixture(scope="module")
def place(cluster: Cluster, operator: str) -> Iterator[str]:
    """A namespace of these tests."""
    with new_namespace(cluster, "rows") as namespace:
        yield namespace


@pytest.fixture(scope="module")
def empty(cluster: Cluster, place: str) -> Deployed:
    """All objects and no engines."""
    scaling = {"minReplicas": 1, "maxReplicas": 2}
    deployed = Deployed.apply(cluster, prism_deployment("empty", place, replicas=0, autoscaling=scaling))
    deployed.wait("Ready")
    eventually("its autoscaler", lambda: ("HorizontalPodAutoscaler", "empty") in children(deployed))
    return deployed


@pytest.fixture(scope="module")
def held(cluster: Cluster, place: str) -> Deployed:
    """Two pods whose image does not exist."""
    body = prism_deployment("held", place, replicas=2, image={"reference": ABSENT_IMAGE})
    return Deployed.apply(cluster, body)


def test_a_second_pass_writes_nothing_and_the_framework_leaves_no_trace(demo: Deployed, empty: Deployed) -> None:
    def is_still() -> dict[tuple[str, str], str] | None:
        before = versions(demo) | versions(empty)
        time.sleep(RESYNCS_S)
        return before if before == versions(demo) | versions(empty) else None

    before = eventually("several passes without a write", is_still)
    assert len(before) >= 28
    for deployed in (demo, empty):
        metadata = deployed.read()["metadata"]
        assert "finalizers" not in metadata
        assert set(metadata.get("annotations", {})) <= {"kubectl.kubernetes.io/last-applied-configuration"}


def test_a_stuck_image_pull_shows_in_stalled_with_the_pods_own_message(held: Deployed) -> None:
    def is_said_of_the_first() -> bool:
        stalled = held.condition("Stalled")
        assert stalled["status"] == "True", stalled
        said: str = stalled["message"]
        return said.startswith("held-engine-0: ") and ABSENT_IMAGE in said

    eventually("the first pod's message", is_said_of_the_first)
    held.wait("Available", "False")


def test_replicas_follow_the_scale_subresource_and_are_never_written(held: Deployed) -> None:
    cluster = held.cluster
    cluster.kubectl("scale", "pd", held.name, "-n", held.namespace, "--replicas=3")
    eventually("three pods", lambda: len(held.engines()) == 3)
    managed = json.loads(
        cluster.kubectl("get", "pd", held.name, "-n", held.namespace, "-o", "json", "--show-managed-fields")
    )["metadata"]["managedFields"]
    ours = [entry for entry in managed if entry["manager"] == "prism-operator"]
    assert ours
    assert all("f:spec" not in entry["fieldsV1"] for entry in ours)
    cluster.kubectl("scale", "pd", held.name, "-n", held.namespace, "--replicas=1")
    eventually("one pod", lambda: len(held.engines()) == 1)


def test_a_pod_that_no_node_takes_shows_in_stalled_with_the_schedulers_message(held: Deployed) -> None:
    held.patch({"podTemplate": {"nodeSelector": {"e2e.prism-infer.io/absent": "true"}}})
    held.wait("Stalled", reason="Unschedulable", says="didn't match Pod's node affinity/selector")
    held.patch({"podTemplate": {"nodeSelector": {"e2e.prism-infer.io/absent": None}}})
    held.wait("Stalled", says=ABSENT_IMAGE)


def test_pods_that_a_quota_forbids_show_in_stalled_with_the_quotas_name(
    cluster: Cluster, operator: str, namespace: str
) -> None:
    about = {"name": "none", "namespace": namespace}
    cluster.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": about, "spec": {"hard": {"pods": "0"}}})
    eventually("the quota in force", lambda: cluster.read("quota", "none", namespace).get("status", {}).get("hard"))
    deployed = Deployed.apply(cluster, prism_deployment("forbidden", namespace))
    deployed.wait("Stalled", reason="FailedCreate", says="exceeded quota: none")
    assert deployed.condition("Stalled")["message"].startswith("engines: ")
    deployed.wait("RouterReady", "False", reason="FailedCreate", says="exceeded quota: none")
    deployed.wait("Available", "False", reason="NoReadyPods")
    deployed.delete()


def test_a_gpu_that_no_node_has_shows_in_stalled(cluster: Cluster, place: str) -> None:
    body = prism_deployment("nogpu", place, engine={"device": "cuda"}, gpu={"memory": "80Gi"})
    deployed = Deployed.apply(cluster, body)
    deployed.wait("Stalled", reason="Unschedulable", says="Insufficient nvidia.com/gpu")
    deployed.wait("KVPlanned")
    deployed.delete()
    eventually("its pod gone", lambda: not deployed.engines())


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("ServiceAccount", "empty-engine"),
        ("ServiceAccount", "empty-router"),
        ("Role", "empty-router"),
        ("RoleBinding", "empty-router"),
        ("Service", "empty"),
        ("Service", "empty-engine"),
        ("StatefulSet", "empty-engine"),
        ("Deployment", "empty-router"),
        ("PodDisruptionBudget", "empty-engine"),
        ("PodDisruptionBudget", "empty-router"),
        ("NetworkPolicy", "empty-engine"),
        ("NetworkPolicy", "empty-router"),
        ("HorizontalPodAutoscaler", "empty"),
        ("Secret", "empty-admin-token"),
        ("ConfigMap", ""),
    ],
)
def test_a_child_that_a_person_deletes_comes_back(empty: Deployed, kind: str, name: str) -> None:
    key = (kind, name) if name else next(key for key in children(empty) if key[0] == kind)
    before = children(empty)[key]["uid"]
    empty.cluster.kubectl("delete", kind, key[1], "-n", empty.namespace, "--wait=false")
    eventually(f"{kind} again", lambda: children(empty).get(key, {}).get("uid", before) != before)


def test_what_leaves_the_spec_is_pruned(empty: Deployed) -> None:
    empty.patch({"autoscaling": None, "networkPolicy": {"enabled": False}})
    policies = {("NetworkPolicy", "empty-engine"), ("NetworkPolicy", "empty-router")}
    pruned = {("HorizontalPodAutoscaler", "empty")} | policies
    eventually("all gone", lambda: not pruned & children(empty).keys())
    empty.wait("Ready")


def test_an_optional_api_that_is_missing_costs_a_line(empty: Deployed, operator: str) -> None:
    empty.patch({"autoscaling": {"kind": "KEDA", "maxReplicas": 2}})
    empty.wait("AutoscalingReady", "False", reason="APIMissing", says="keda.sh/v1alpha1")
    empty.patch({"gateway": {"inferencePool": {"endpointPickerRef": {"name": "picker"}}}})
    empty.wait("InferencePoolReady", "False", reason="APIMissing", says="inference.networking.k8s.io/v1")
    empty.wait("Ready")
    log = empty.cluster.kubectl("logs", "-n", operator, "deployment/prism-operator")
    lines = [line for line in log.splitlines() if "optional APIs" in line]
    assert len(lines) == 1
    assert "PodMonitor" in lines[0]
    empty.patch({"autoscaling": None, "gateway": None})
    empty.wait("Ready")
    said = {condition["type"] for condition in empty.status["conditions"]}
    assert not said & {"AutoscalingReady", "InferencePoolReady"}


def test_two_cards_for_one_engine_are_refused_with_a_plan_and_without_pods(cluster: Cluster, place: str) -> None:
    body = prism_deployment("two", place, engine={"device": "cuda", "tensorParallel": 2}, gpu={"memory": "80Gi"})
    deployed = Deployed.apply(cluster, body)
    deployed.wait("TensorParallelUnavailable", says="tensorParallel")
    deployed.wait("Available", "False", reason="NoPods")
    planned = deployed.wait("KVPlanned")
    assert "TP 2" in planned["message"]
    assert deployed.engines() == []
    assert ("StatefulSet", "two-engine") not in children(deployed)
    deployed.delete()
