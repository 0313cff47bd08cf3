"""Plans for real cards: labels and devices as on a GPU node, and an engine that computes on the CPU beside one."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest

from e2e.cluster import gpu
from e2e.harness import Cluster, Object, eventually
from e2e.prism import Deployed, merged, new_namespace, prism_deployment

GIVEN_MEMORY = "80Gi"


LABEL = "e2e.prism-infer.io/paper"
NODES_KNOWN_S = 12
"""The operator reads nodes again every ten seconds."""
PAPER_NODES = {
    "labels": ("paper-h100", gpu.H100, 1),
    "shared": ("paper-shared", gpu.A100_80GB, 4),
    "mixed": ("paper-h200", gpu.H200, 1),
    "mixed ": ("paper-5090", gpu.RTX_5090, 1),
}
"""A value of the label, as a nodeSelector has it, to a name, a card and its time slices."""


@pytest.fixture(scope="module")
def paper_nodes(cluster: Cluster) -> Iterator[float]:
    """Nodes with cards that exist on paper: no kubelet stands behind them. Yields the time when the last was made."""
    for value, (name, card, slices) in PAPER_NODES.items():
        make_node(cluster, name, card.labels(8, replicas=slices) | {LABEL: value.strip()}, 8 * slices)
    yield time.monotonic()
    cluster.kubectl("delete", "node", "-l", LABEL, "--wait=false")


def make_node(cluster: Cluster, name: str, labels: dict[str, str], num_devices: int) -> None:
    """It takes no pods."""
    metadata = {"name": name, "labels": labels}
    cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": metadata, "spec": {"unschedulable": True}})
    amounts = {gpu.RESOURCE: str(num_devices)}
    patch = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
    cluster.kubectl("patch", "node", name, "--subresource=status", "--type=merge", "-p", patch)


@pytest.fixture(scope="module")
def place(cluster: Cluster, operator: str, paper_nodes: float) -> Iterator[str]:
    """A namespace of these tests."""
    with new_namespace(cluster, "gpus") as namespace:
        yield namespace


@pytest.fixture
def known(paper_nodes: float) -> None:
    """The operator has seen the nodes."""
    time.sleep(max(0.0, paper_nodes + NODES_KNOWN_S - time.monotonic()))


def on_paper(name: str, namespace: str, **changes: object) -> Object:
    """A deployment for the nodes of that label: it is planned for, and no pod ever runs."""
    selector = {"podTemplate": {"nodeSelector": {LABEL: name}}}
    body = prism_deployment(name, namespace, **merged({"engine": {"device": "cuda"}, "kv": {"pages": 0}}, changes))
    return merged(body, {"spec": selector})


def pod_uids(deployed: Deployed) -> set[str]:
    return {pod["metadata"]["uid"] for pod in deployed.engines()}


def test_an_engine_beside_a_card_is_planned_for_and_runs_and_no_fact_takes_it_away(
    cluster: Cluster, place: str, two_gpus: str
) -> None:
    card = {"limits": {gpu.RESOURCE: "1", "memory": "2Gi"}}
    body = prism_deployment("card", place, gpu={"memory": GIVEN_MEMORY}, podTemplate={"resources": card})
    deployed = Deployed.apply(cluster, body)
    try:
        deployed.wait("KVPlanned", reason="Planned", says="80.00 GiB x 0.85")
        deployed.wait("Ready")
        deployed.wait("KVPlanMatched", says="planned 128 pages, measured 128 pages on card-engine-0")
        status = deployed.status
        assert (status["plannedPages"], status["measuredPages"]) == (128, 128)
        (pod,) = deployed.engines()
        assert pod["spec"]["containers"][0]["resources"]["limits"][gpu.RESOURCE] == "1"

        deployed.patch({"gpu": {"memory": "8Gi"}, "kv": {"pages": 100_000_000}})
        deployed.wait("KVPlanned", "False", reason="DoesNotFit", says="Try: kv.pages:")
        frozen = deployed.wait("Ready", "False", reason="DoesNotFit")
        assert "generation 1 serves on" in frozen["message"]
        deployed.wait("Available")
        assert pod_uids(deployed) == {pod["metadata"]["uid"]}
        deployed.patch({"gpu": {"memory": GIVEN_MEMORY}, "kv": {"pages": 128}})
        deployed.wait("Ready")
        assert pod_uids(deployed) == {pod["metadata"]["uid"]}
    finally:
        deployed.delete()
        eventually("its card free", lambda: not deployed.engines())


def test_removing_every_gpu_label_deletes_nothing(cluster: Cluster, place: str, known: None) -> None:
    deployed = Deployed.apply(cluster, on_paper("labels", place, model={"shape": "8b"}))
    deployed.wait("KVPlanned", reason="Planned", says="8b, bf16, TP 1: 79.65 GiB x 0.85")
    (before,) = eventually("its pod", lambda: pod_uids(deployed))
    assert deployed.status["plannedPages"] > 1000
    cluster.kubectl("label", "node", "paper-h100", *(f"{label}-" for label in gpu.H100.labels(8)))
    deployed.wait("KVPlanned", "Unknown", reason="NoFacts", says="label nvidia.com/gpu.memory")
    assert pod_uids(deployed) == {before}


def test_a_time_sliced_card_needs_the_pods_own_part(cluster: Cluster, place: str, known: None) -> None:
    deployed = Deployed.apply(cluster, on_paper("shared", place))
    deployed.wait("KVPlanned", "False", reason="SharedGPU", says="gpu.memory")
    deployed.wait("Ready", "False", reason="SharedGPU")
    assert deployed.engines() == []
    deployed.patch({"gpu": {"memory": "20Gi", "sharing": "time-slicing"}})
    deployed.wait("KVPlanned", reason="Planned", says="20.00 GiB")
    eventually("its pod", deployed.engines)


def test_one_small_card_among_large_ones_refuses_nothing(cluster: Cluster, place: str, known: None) -> None:
    deployed = Deployed.apply(cluster, on_paper("mixed", place, model={"shape": "32b"}))
    planned = deployed.wait("KVPlanned", reason="SomeNodesFit", says="It fits 1 of 2 eligible nodes")
    assert '"operator": "Gt", "values": ["32607"]' in planned["message"]
    eventually("its pod", deployed.engines)
