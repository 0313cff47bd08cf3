"""Fixtures of the tests that run on a real cluster: `make e2e`."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import kubernetes
import pytest

from e2e import metrics_api
from e2e.cluster import gpu
from e2e.cluster.layout import NODE, Layout
from e2e.harness import Cluster, Images, eventually
from e2e.prism import demo, operator

__all__ = ["demo", "operator"]
"""Session fixtures: named here once, so that every module shares them."""
LONGEST_TEST_S = 1800
"""Its fixtures included: the longest takes two minutes, on a machine that has nothing else to do."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The limit is for what hangs. Waits have limits of their own, which say what they wait for."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LONGEST_TEST_S))


@pytest.fixture(scope="session")
def cluster() -> Cluster:
    """The cluster that KUBECONFIG names. It is not started here: `make e2e` does that."""
    if "KUBECONFIG" not in os.environ:
        pytest.exit("no cluster: run `make e2e`, or set KUBECONFIG", returncode=4)
    kubernetes.config.load_kube_config()  # type: ignore[no-untyped-call]
    layout = Layout.from_environment()
    own = layout if os.environ["KUBECONFIG"] == str(layout.kubeconfig()) else None
    return Cluster(Images.from_environment(), own)


@pytest.fixture
def namespace(cluster: Cluster) -> Iterator[str]:
    """A namespace of the test's own, under the strictest Pod Security; gone, with all that is in it, after the test."""
    name = f"e2e-{secrets.token_hex(4)}"
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}})
    eventually("its service account", lambda: cluster.get("serviceaccount", "default", name))
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture(scope="session")
def own_node(cluster: Cluster) -> Layout:
    """For tests that change the node itself; they are skipped on a cluster that we did not start."""
    if cluster.own is None:
        pytest.skip("changes the node: only on a cluster of our own")
    return cluster.own


@pytest.fixture
def two_gpus(cluster: Cluster, own_node: Layout) -> Iterator[str]:
    """The node has two H100, as far as scheduler, kubelet and labels can tell. Yields the node's name."""
    with gpu.devices(own_node, 2), cluster.node_labels(NODE, gpu.H100.labels(2)):
        eventually("two allocatable devices", lambda: allocatable(cluster) == 2)
        yield NODE
    eventually("no allocatable device", lambda: allocatable(cluster) == 0)


@pytest.fixture
def pod_metrics(cluster: Cluster, own_node: Layout, tmp_path: Path) -> Iterator[dict[str, float]]:
    """Metric name to the value that every pod shows to autoscalers; the test sets them."""
    with metrics_api.serving(cluster, tmp_path) as values:
        yield values


def allocatable(cluster: Cluster) -> int:
    """Devices that the scheduler may hand out."""
    node = cluster.get("node", NODE)
    assert node is not None
    return int(node["status"]["allocatable"].get(gpu.RESOURCE, 0))
