"""The reconciler against a real API server with its controllers; the test plays the kubelet."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from operator_cluster import DEMO, MERGE_PATCH, World, until

from prism_operator.api import (
    AUTOSCALER,
    CHILD_KINDS,
    CONFIG_MAP,
    DEPLOYMENT,
    NODE,
    POD,
    PRISM_DEPLOYMENT,
    SECRET,
    STATEFUL_SET,
    Kind,
)
from prism_operator.deployment import LABEL_CLASS, LABEL_COMPONENT, MANAGED_BY
from prism_operator.options import OperatorOptions
from prism_operator.status import timestamp

if not os.environ.get("KUBECONFIG"):
    pytest.skip("needs a cluster: KUBECONFIG", allow_module_level=True)
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SERVICE = Kind("v1", "Service", "services")
POLICY = Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
ENGINE = "demo-engine"


def spec(**changes: Any) -> dict[str, Any]:
    return {**DEMO, "replicas": 2, **changes}


def image(reference: str) -> dict[str, str]:
    return {"reference": reference}


def test_from_a_spec_to_ready_pods_and_a_second_pass_writes_nothing(world: World) -> None:
    world.put(spec())
    world.settle()
    assert world.condition("Ready").status == "True", world.condition("Ready")
    assert world.condition("Available").status == "True"
    before, writes = world.versions(), world.api.num_writes
    world.step()
    assert world.api.num_writes == writes
    world.now_s += 1000.0
    world.step()
    world.restart()
    world.step()
    assert world.versions() == before
    metadata = world.api.get(PRISM_DEPLOYMENT, world.namespace, "demo")["metadata"]
    assert not metadata.get("finalizers")
    assert not metadata.get("annotations")


def test_spec_replicas_is_never_written_and_the_workload_follows_it(world: World) -> None:
    world.put(spec())
    world.settle()
    scale = PRISM_DEPLOYMENT.path(world.namespace, "demo", "scale")
    world.api.call("PATCH", scale, {"fieldManager": "hpa"}, {"spec": {"replicas": 3}}, MERGE_PATCH)
    world.settle()
    assert len(world.pods()) == 3
    world.restart()
    world.settle()
    body = world.api.get(PRISM_DEPLOYMENT, world.namespace, "demo")
    assert (body["spec"]["replicas"], len(world.pods())) == (3, 3)
    ours = [entry for entry in body["metadata"]["managedFields"] if entry["manager"] == "prism-operator"]
    assert all("f:spec" not in entry["fieldsV1"] for entry in ours)
    answer = world.api.call("GET", scale)
    assert answer["status"]["selector"] == "prism-infer.io/deployment=demo,app.kubernetes.io/component=engine"


def test_a_child_that_a_person_deletes_comes_back(world: World) -> None:
    world.put(spec())
    world.settle()
    for kind in CHILD_KINDS:
        for body in [] if kind.is_optional else world.api.list(kind, world.namespace, f"{LABEL_CLASS}=prism"):
            name = body["metadata"]["name"]
            if kind is not STATEFUL_SET:
                world.api.delete(kind, world.namespace, name, body["metadata"]["uid"])
                world.step()
                assert world.get(kind, name) is not None, (kind.kind, name)
    secret = world.api.get(SECRET, world.namespace, "demo-admin-token")
    world.api.delete(SECRET, world.namespace, "demo-admin-token", secret["metadata"]["uid"])
    world.now_s += world.options.resync_s
    world.step()
    assert world.api.get(SECRET, world.namespace, "demo-admin-token")["data"] == secret["data"]


def test_a_persons_edit_of_a_child_is_taken_back_and_another_controllers_is_a_conflict(world: World) -> None:
    world.put(spec())
    world.settle()
    path = STATEFUL_SET.path(world.namespace, ENGINE)
    world.api.call("PATCH", path, {"fieldManager": "kubectl-edit"}, {"spec": {"replicas": 5}}, MERGE_PATCH)
    world.step()
    assert world.api.get(STATEFUL_SET, world.namespace, ENGINE)["spec"]["replicas"] == 2
    world.api.call("PATCH", path, {"fieldManager": "other-controller"}, {"spec": {"replicas": 1}}, MERGE_PATCH)
    world.step()
    assert world.api.get(STATEFUL_SET, world.namespace, ENGINE)["spec"]["replicas"] == 1
    assert 'conflict with "other-controller"' in world.condition("ChildConflict").message


def test_somebody_elses_object_of_that_name_is_never_touched(world: World) -> None:
    port = {"port": 80}
    stranger = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "demo"}, "spec": {"ports": [port]}}
    before = world.api.call("POST", SERVICE.path(world.namespace), {"fieldManager": "someone"}, stranger)
    world.put(spec())
    world.step()
    assert world.api.get(SERVICE, world.namespace, "demo") == before
    assert "Service demo" in world.condition("ChildConflict").message
    assert world.condition("Ready").reason == "ChildConflict"


def test_a_child_that_leaves_the_spec_is_pruned(world: World) -> None:
    world.put(spec(autoscaling={"maxReplicas": 3}))
    world.settle()
    assert world.get(AUTOSCALER, "demo") is not None
    assert world.condition("AutoscalingReady").status in ("False", "Unknown")
    world.put(spec())
    world.step()
    assert world.get(AUTOSCALER, "demo") is None


def test_a_configuration_stays_as_long_as_a_pod_of_the_old_revision_needs_it(world: World) -> None:
    world.put(spec())
    world.settle()
    (old,) = (body["metadata"]["name"] for body in world.api.list(CONFIG_MAP, world.namespace, f"{LABEL_CLASS}=prism"))
    world.put(spec(engine={"device": "cpu", "maxRunningSequences": 7}))
    world.step()
    world.step()
    assert len(world.revisions()) >= 1
    assert world.get(CONFIG_MAP, old) is not None
    for sequences in range(8, 12):
        world.put(spec(engine={"device": "cpu", "maxRunningSequences": sequences}))
        until(lambda: (world.run_kubelet(), world.step(), world.is_ready())[2], "rolled out")
    assert len(world.api.list(CONFIG_MAP, world.namespace, f"{LABEL_CLASS}=prism")) <= 5, "history is short"


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ({"gpu": {"memory": "1Gi"}, "engine": {}, "model": {"source": {"demo": {}}, "shape": "8b"}}, "DoesNotFit"),
        ({"engine": {"device": "cuda", "tensorParallel": 2}}, "TensorParallelUnavailable"),
        ({"model": {"source": {"hostPath": {"path": "/models"}}, "shape": "demo"}}, "HostPathNotAllowed"),
        ({"engine": {"device": "cpu", "overrides": {"engine": {"nonsense": 1}}}}, "InvalidSettings"),
        ({"podTemplate": {"affinity": {"nodeAffinity": {"nonsense": []}, "podAffinity": 3}}}, "WorkloadRefused"),
        ({"router": {"podTemplate": {"affinity": {"podAffinity": 3}}}}, "WorkloadRefused"),
        ({"router": {"overrides": {"upstream": {"nonsense": 1}}}}, "InvalidSettings"),
    ],
)
def test_a_spec_that_cannot_be_served_freezes_what_serves(world: World, edit: dict[str, Any], reason: str) -> None:
    world.put(spec())
    world.settle()
    before = {key: version for key, version in world.versions().items() if key[0] != "PrismDeployment"}
    pods = {pod.uid for pod in world.pods()}
    world.put(spec(**edit))
    for _ in range(3):
        world.step()
    assert {key: version for key, version in world.versions().items() if key[0] != "PrismDeployment"} == before
    assert {pod.uid for pod in world.pods()} == pods
    ready, status = world.condition("Ready"), world.status()
    assert (ready.status, ready.reason, ready.observed_generation) == ("False", reason, 2)
    assert "generation 1 serves on" in ready.message
    assert (status.observed_generation, status.serving_generation) == (2, 1)
    assert world.condition("Available").status == "True"
    world.put(spec())
    world.settle()
    assert world.condition("Ready").status == "True"
    assert {pod.uid for pod in world.pods()} == pods


def test_an_infeasible_spec_that_serves_nothing_makes_no_pods(world: World) -> None:
    world.put(spec(engine={"device": "cuda", "tensorParallel": 2}))
    for _ in range(2):
        world.step()
    assert world.get(STATEFUL_SET, ENGINE) is None
    assert world.condition("TensorParallelUnavailable").status == "True"
    assert world.condition("Available").reason == "NoPods"


def roll(world: World, floor: int) -> None:
    """One pass, then controllers and the kubelet; the floor holds."""
    world.step()
    assert world.num_ready() >= floor, world.pods()
    time.sleep(0.15)
    world.run_kubelet()


def roll_until(world: World, is_so: Callable[[], bool], what: str, floor: int) -> None:
    """Passes with the floor held after each."""
    until(lambda: (roll(world, floor), is_so())[1], what)


def test_three_edits_in_a_row_never_go_below_the_floor_of_ready_pods(world: World) -> None:
    world.put(spec(replicas=3))
    world.settle()
    for reference in ("a:1", "bad:1", "a:2"):
        world.put(spec(replicas=3, image=image(reference)))
        for _ in range(4):
            roll(world, floor=2)
    roll_until(world, lambda: world.images() == ["a:2"] * 3 and world.is_ready(), "the last one is rolled out", floor=2)


def test_a_bad_image_then_back_to_the_good_one_needs_nobody(world: World) -> None:
    world.put(spec())
    world.settle()
    world.put(spec(image=image("bad:1")))

    def is_stalled() -> bool:
        stalled = world.condition("Stalled")
        is_told = stalled.message.endswith("no such image: bad:1")
        return (stalled.status, stalled.reason, is_told) == ("True", "ImagePullBackOff", True)

    roll_until(world, is_stalled, "it is stalled", floor=1)
    for _ in range(4):
        roll(world, floor=1)
    assert world.images().count("bad:1") == 1
    assert (world.condition("Available").status, world.condition("Ready").status) == ("True", "False")
    world.put(spec())
    roll_until(world, world.is_ready, "the way back", floor=1)
    world.settle()
    assert world.condition("Ready").status == "True"
    assert world.condition("Stalled").status == "False"


def set_ready(world: World, name: str, status: str) -> None:
    """As a kubelet whose probes have changed their mind about that pod."""
    conditions = [{"type": "Ready", "status": status, "lastTransitionTime": timestamp(datetime.now(UTC))}]
    world.patch_status(POD, name, {"conditions": conditions})


def test_ready_engines_without_a_ready_router_serve_nobody(world: World) -> None:
    world.put(spec())
    world.settle()
    for status, reason in (("False", "NoReadyRouters"), ("True", "Serving")):
        for router in world.routers():
            set_ready(world, router["metadata"]["name"], status)
        world.step()
        found = world.condition("Available")
        assert (found.status, found.reason) == (status, reason)
        assert world.condition("RouterReady").status == status
        assert world.num_ready() == 2


def test_with_one_replica_no_surge_is_said_before_the_gap(world: World) -> None:
    world.put(spec(replicas=1))
    world.settle()
    (old,) = (pod.uid for pod in world.pods())
    world.put(spec(replicas=1, image=image("a:1")))
    until(lambda: (world.step(), world.condition("Progressing").reason == "NoSurge")[1], "NoSurge is said")
    assert [pod.uid for pod in world.pods()] == [old]
    until(lambda: (world.step(), [pod.uid for pod in world.pods()] != [old])[1], "then the pod goes")
    world.settle()
    assert world.images() == ["a:1"]
    assert world.condition("Progressing").reason == "RolledOut"


def test_an_operator_upgrade_alone_changes_no_pod_template(world: World) -> None:
    world.put(spec())
    world.settle()
    workloads = ((STATEFUL_SET, ENGINE), (DEPLOYMENT, "demo-router"))
    before = [world.api.get(kind, world.namespace, name)["spec"]["template"] for kind, name in workloads]
    world.options = OperatorOptions(
        operator_namespace=world.namespace, cpu_image="prism-server-cpu:9.9", router_image="prism-router:9.9"
    )
    world.restart()
    world.settle()
    assert [world.api.get(kind, world.namespace, name)["spec"]["template"] for kind, name in workloads] == before
    world.put(spec(engine={"device": "cpu", "maxRunningSequences": 3}))
    world.settle()
    assert world.images() == ["prism-server-cpu:9.9"] * 2


def test_a_service_that_led_to_engines_is_handed_over_to_routers_without_a_gap(world: World) -> None:
    """As an upgrade finds it that is the first to bring routers."""
    world.put(spec())
    world.settle()
    engines = {pod.uid for pod in world.pods()}
    ours = {"fieldManager": MANAGED_BY}
    to_engines = {"spec": {"selector": {LABEL_COMPONENT: "engine"}}}
    world.api.call("PATCH", SERVICE.path(world.namespace, "demo"), ours, to_engines, MERGE_PATCH)
    world.api.call("PATCH", POLICY.path(world.namespace, ENGINE), ours, {"spec": {"ingress": [{}]}}, MERGE_PATCH)
    routers = world.api.get(DEPLOYMENT, world.namespace, "demo-router")
    world.api.delete(DEPLOYMENT, world.namespace, "demo-router", routers["metadata"]["uid"])
    until(lambda: not world.routers(), "no routers")

    def is_open() -> tuple[str, bool]:
        service = world.api.get(SERVICE, world.namespace, "demo")["spec"]["selector"][LABEL_COMPONENT]
        return service, world.api.get(POLICY, world.namespace, ENGINE)["spec"]["ingress"] == [{}]

    world.step()
    assert is_open() == ("engine", True)
    assert world.condition("Available").status == "True"
    until(lambda: (world.run_kubelet(), world.num_ready_routers() > 0)[1], "a router")
    world.step()
    assert is_open() == ("router", True), "whoever has not heard of it yet still gets in"
    world.settle()
    assert is_open() == ("router", False)
    assert world.condition("Ready").status == "True"
    assert {pod.uid for pod in world.pods()} == engines


def test_only_so_many_rollouts_at_a_time(world: World) -> None:
    for name in ("demo", "other"):
        world.put(spec(), name)
        until(lambda name=name: (world.step(name), world.get(STATEFUL_SET, f"{name}-engine"))[1], "a workload")
    until(lambda: (world.run_kubelet(), world.step(), world.step("other"), world.num_ready() == 4)[3], "four pods")
    for name in ("demo", "other"):
        world.put(spec(image=image("a:1")), name)

    def old(name: str) -> int:
        return sum(pod.name.startswith(name) for pod in world.pods() if pod.revision not in new_revisions())

    def new_revisions() -> set[str]:
        return {body["status"].get("updateRevision", "") for body in world.api.list(STATEFUL_SET, world.namespace)}

    until(lambda: (world.step(), old("demo") == 1)[1], "the first begins")
    until(lambda: (world.step("other"), old("other") > 0)[1], "the other has its new revision")
    world.step("other")
    assert old("other") == 2
    until(lambda: (world.run_kubelet(), world.step(), world.step("other"), old("other") == 0)[3], "then the other")


def test_another_class_is_not_ours(world: World) -> None:
    world.put(spec(operatorClass="theirs"))
    assert world.step() is None
    assert world.api.list(STATEFUL_SET, world.namespace) == []
    assert "status" not in world.api.get(PRISM_DEPLOYMENT, world.namespace, "demo")


def test_deleting_it_leaves_nothing_behind(world: World) -> None:
    world.put(spec(autoscaling={}))
    world.settle()
    body = world.api.get(PRISM_DEPLOYMENT, world.namespace, "demo")
    world.api.delete(PRISM_DEPLOYMENT, world.namespace, "demo", body["metadata"]["uid"])
    assert world.step() is None
    kept = {("ServiceAccount", "default"), ("ConfigMap", "kube-root-ca.crt")}
    until(lambda: not world.versions().keys() - kept, "all children are gone")
    until(lambda: not world.pods(), "all pods are gone")


def test_an_optional_api_that_is_missing_costs_nothing_but_a_line(world: World) -> None:
    world.put(spec(autoscaling={"kind": "KEDA", "prometheusAddress": "http://prometheus:9090"}))
    world.settle()
    assert world.condition("AutoscalingReady").reason == "APIMissing"
    assert world.condition("Ready").status == "True"


def test_a_pod_on_a_lost_node_is_replaced(world: World) -> None:
    world.options = OperatorOptions(operator_namespace=world.namespace, lost_node_grace_s=600.0)
    world.restart()
    world.put(spec())
    world.settle()
    name = f"lost-{world.namespace}"
    world.api.create(NODE, "", {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}})
    try:
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": f"{ENGINE}-1"}, "target": {"name": name}}
        world.api.call("POST", POD.path(world.namespace, f"{ENGINE}-1", "binding"), None, binding)
        (lost,) = (pod for pod in world.pods() if pod.node == name)
        world.api.delete(POD, world.namespace, lost.name, lost.uid, grace_s=1)
        world.step()
        assert lost.uid in {pod.uid for pod in world.pods()}, "not before its grace is over"
        world.options = OperatorOptions(operator_namespace=world.namespace, lost_node_grace_s=0.5)
        world.restart()
        until(lambda: (world.step(), lost.uid not in {pod.uid for pod in world.pods()})[1], "it is force-deleted")
        world.settle()
        assert world.num_ready() == 2
    finally:
        world.api.delete(NODE, "", name, world.api.get(NODE, "", name)["metadata"]["uid"])


def test_events_tell_of_transitions(world: World) -> None:
    world.put(spec())
    world.settle()
    events = world.api.list(Kind("v1", "Event", "events"), world.namespace, fields="involvedObject.name=demo")
    assert any(event["message"].startswith("Ready=True") for event in events)
