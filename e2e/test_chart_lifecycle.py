"""Releases of the chart: beside one another, upgraded, gone, and made again under another name."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from e2e.harness import WAIT, Cluster, Object, eventually
from e2e.prism import (
    CHART,
    SYSTEM,
    Deployed,
    ask,
    chart_values,
    chat,
    children,
    install,
    new_namespace,
    prism_deployment,
    text_of,
)

CLASS = "second"
NAMESPACED = {"scope": "namespace", "crds": {"enabled": False}, "rbac": {"aggregate": False}}
CLUSTER_KINDS = "clusterroles,clusterrolebindings"


def install_second(cluster: Cluster, namespace: str, release: str, **values: object) -> None:
    """A release that takes care of its own namespace, by Roles alone."""
    install(cluster, release, namespace, **NAMESPACED | {"operator": {"class": CLASS}} | values)


@pytest.fixture(scope="module")
def second(cluster: Cluster, operator: str) -> Iterator[Deployed]:
    """A PrismDeployment under the release `second`, which stands beside the one of the whole cluster."""
    with new_namespace(cluster, "second") as namespace:
        install_second(cluster, namespace, "second")
        deployed = Deployed.apply(cluster, prism_deployment("pages", namespace, operatorClass=CLASS))
        deployed.wait("Ready")
        yield deployed


def templates(cluster: Cluster, deployed: Deployed) -> list[Object]:
    """Of its engines and of its routers."""
    label = f"prism-infer.io/deployment={deployed.name}"
    found = cluster.list("statefulsets,deployments", deployed.namespace, label)
    assert len(found) == 2
    return [workload["spec"]["template"] for workload in sorted(found, key=lambda body: str(body["kind"]))]


def pod_uids(deployed: Deployed) -> list[str]:
    """Of engines and routers."""
    return [pod["metadata"]["uid"] for pod in (*deployed.engines(), *deployed.routers())]


def greeted(deployed: Deployed) -> bool:
    """Whether it answers through its Service."""
    return text_of(ask(deployed.url, chat("Hello", max_tokens=4))) != ""


def test_a_namespaced_release_works_by_roles_alone(cluster: Cluster, second: Deployed) -> None:
    owned = json.loads(cluster.kubectl("get", CLUSTER_KINDS, "-o", "json"))["items"]
    names = [item["metadata"]["name"] for item in owned]
    assert not [name for name in names if second.namespace in name]
    assert [name for name in names if SYSTEM in name], "the release of the whole cluster has some"
    assert greeted(second)


def test_an_operator_touches_its_own_class_alone(cluster: Cluster, second: Deployed) -> None:
    orphan = Deployed.apply(cluster, prism_deployment("orphan", second.namespace, operatorClass="nobody", replicas=0))
    log = cluster.kubectl("get", "lease", "-n", second.namespace, "-o", "name").split()
    assert log == ["lease.coordination.k8s.io/second-operator"]
    generation = second.read()["metadata"]["generation"]
    second.patch({"service": {"annotations": {"example.com/seen": "yes"}}})
    eventually("a later pass of the second operator", lambda: second.status.get("observedGeneration", 0) > generation)
    assert orphan.status == {}
    assert children(cluster, orphan) == []
    classes = {child["metadata"]["labels"].get("prism-infer.io/operator-class") for child in children(cluster, second)}
    assert classes == {CLASS}
    orphan.delete()


def test_helm_test_passes(cluster: Cluster, operator: str, second: Deployed) -> None:
    for release, namespace in (("second", second.namespace), ("prism", operator)):
        assert "Phase:          Succeeded" in cluster.helm("test", release, "-n", namespace, WAIT)


def test_an_upgrade_of_the_release_changes_no_pod_template(cluster: Cluster, second: Deployed) -> None:
    before = templates(cluster, second), pod_uids(second)
    images = {"serverCPU": {"tag": "newer"}, "router": {"tag": "newer"}}
    newer = {"images": images, "operator": {"class": CLASS, "logLevel": "DEBUG"}}
    install_second(cluster, second.namespace, "second", **newer)
    generation = second.read()["metadata"]["generation"]
    second.patch({"service": {"annotations": {"example.com/upgraded": "yes"}}})
    eventually("a pass of the new operator", lambda: second.status["observedGeneration"] > generation)
    assert (templates(cluster, second), pod_uids(second)) == before
    second.wait("Ready")


def test_no_object_ever_has_a_finalizer_or_a_note_of_the_framework(cluster: Cluster, second: Deployed) -> None:
    found = [second.read(), *children(cluster, second)]
    kinds = {"StatefulSet", "Deployment", "Service", "ConfigMap", "ServiceAccount", "Role", "RoleBinding"}
    kinds |= {"PodDisruptionBudget", "NetworkPolicy", "Secret", "Pod", "PrismDeployment"}
    assert {item["kind"] for item in found} >= kinds
    assert [item for item in found if item["metadata"].get("finalizers")] == []
    assert "kopf" not in json.dumps(found)


def test_pods_serve_on_without_the_release_and_go_with_their_deployment(cluster: Cluster, second: Deployed) -> None:
    """Uninstall, ask, delete, install under another name, and away with the namespace: nothing hangs."""
    uids = pod_uids(second)
    cluster.helm("uninstall", "second", "-n", second.namespace, "--wait")
    assert cluster.get("crd", "prismdeployments.prism-infer.io") is not None
    assert pod_uids(second) == uids
    assert greeted(second)

    install_second(cluster, second.namespace, "third", crds={"enabled": True})
    second.wait("Ready")
    assert pod_uids(second) == uids
    cluster.helm("uninstall", "third", "-n", second.namespace, "--wait")
    second.delete()
    eventually("no child is left", lambda: children(cluster, second) == [])

    cluster.apply(prism_deployment("late", second.namespace, operatorClass=CLASS))  # nobody takes care of it
    cluster.kubectl("delete", "namespace", second.namespace, WAIT)
    assert cluster.get("namespace", second.namespace) is None


def test_a_namespace_goes_at_once_while_the_operator_works_in_it(cluster: Cluster, operator: str) -> None:
    with new_namespace(cluster, "short") as namespace:
        deployed = Deployed.apply(cluster, prism_deployment("pages", namespace))
        eventually("an engine", deployed.engines)
        cluster.kubectl("delete", "namespace", namespace, WAIT)
        assert cluster.get("namespace", namespace) is None


def test_the_chart_is_clean_for_helm_itself(cluster: Cluster) -> None:
    cluster.helm("lint", str(CHART), "--strict", "-f", "-", stdin=json.dumps(chart_values(cluster)))
