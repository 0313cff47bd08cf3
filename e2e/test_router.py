"""Routers in front of engines: pods of both kinds come and go, no stream fails, and pages are found where they were."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.harness import PATIENCE_S, WAIT, Cluster, eventually, pod
from e2e.load import AT_HOME, homes, known_readings, readers
from e2e.prism import Deployed, invoice_pages, new_namespace, prism_deployment

PAGES = [invoice_pages(seed)[0] for seed in range(200, 208)]
NEW_PAGES = [invoice_pages(seed)[0] for seed in range(300, 308)]


@pytest.fixture(scope="module")
def fleet(cluster: Cluster, operator: str) -> Iterator[Deployed]:
    """One engine behind two routers, Ready; two engines after the first test."""
    with new_namespace(cluster, "router") as namespace:
        drain = {"propagationSeconds": 5, "streamSeconds": 90}
        body = prism_deployment("fleet", namespace, router={"replicas": 2, **AT_HOME}, drain=drain)
        deployed = Deployed.apply(cluster, body)
        deployed.wait("Ready")
        yield deployed
        deployed.delete("--wait=false")


def scale(deployed: Deployed, replicas: int) -> None:
    """As a person or an autoscaler does, on the subresource; returns when so many serve."""
    deployed.cluster.kubectl("scale", "pd", deployed.name, "-n", deployed.namespace, f"--replicas={replicas}")
    eventually("the pass", lambda: deployed.status["observedGeneration"] == deployed.read()["metadata"]["generation"])
    deployed.wait("Ready", timeout_s=2 * PATIENCE_S)


def uids(deployed: Deployed) -> tuple[set[str], set[str]]:
    """Of engines, and of routers."""
    engines, routers = ({p["metadata"]["uid"] for p in pods} for pods in (deployed.engines(), deployed.routers()))
    return engines, routers


def test_engines_from_one_to_three_to_two_and_new_routers_fail_no_stream_and_hits_follow(fleet: Deployed) -> None:
    _, old_routers = uids(fleet)
    with readers(fleet.url, PAGES) as readings:
        scale(fleet, 3)
        fleet.patch({"router": {"podTemplate": {"labels": {"mark": "rolled"}}}})
        eventually("no old router", lambda: not old_routers & uids(fleet)[1])
        fleet.wait("Ready")
    known_readings(fleet.url, PAGES)
    of_three = homes(fleet.url, NEW_PAGES)
    with readers(fleet.url, PAGES) as more_readings:
        scale(fleet, 2)
    known_readings(fleet.url, PAGES)
    of_two = homes(fleet.url, NEW_PAGES)
    assert [reading for reading in (*readings, *more_readings) if reading.problem] == []
    assert len(set(of_three.values())) > 1, "new engines get pages"
    moved = {number for number, home in of_three.items() if of_two[number] != home}
    assert moved == {number for number, home in of_three.items() if home == "fleet-engine-2"}, "the one that went"
    assert fleet.condition("RouterReady")["status"] == fleet.condition("Available")["status"] == "True"


def test_the_next_engine_waits_for_every_router(fleet: Deployed) -> None:
    """One that is ready and tells the operator nothing: a pod that has a router's labels, and is none."""
    cluster, (engines, _) = fleet.cluster, uids(fleet)
    labels = {"prism-infer.io/deployment": fleet.name, "app.kubernetes.io/component": "router"}
    cluster.apply(pod("stranger", fleet.namespace, cluster.images.base, "sleep", "600", labels=labels))
    cluster.kubectl("wait", "pod/stranger", "-n", fleet.namespace, "--for=condition=Ready", WAIT)
    fleet.patch({"podTemplate": {"labels": {"mark": "held"}}})
    fleet.wait("Progressing", reason="WaitingForRouters", says="router stranger does not answer the operator")
    fleet.wait("Ready", "False", reason="WaitingForRouters")
    fleet.wait("Available")
    assert uids(fleet)[0] == engines
    fleet.patch({"podTemplate": {"labels": {"mark": None}}})
    fleet.wait("Ready")
    assert uids(fleet)[0] == engines
    cluster.kubectl("delete", "pod", "stranger", "-n", fleet.namespace, "--wait=false")
