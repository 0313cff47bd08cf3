"""An HPA moves `spec.replicas` by what waits and runs; nobody else does."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from e2e.harness import WAIT, Cluster, eventually
from e2e.prism import Deployed, new_namespace, prism_deployment

METRIC = "prism_uncached_tokens"
TARGET_TOKENS = 1000
RESYNCS_S = 6
"""Three of the operator's, which are short in tests (`QUICK`)."""


@pytest.fixture
def scaled(cluster: Cluster, operator: str, pod_metrics: dict[str, float]) -> Iterator[Deployed]:
    """One engine that an autoscaler may make two."""
    pod_metrics[METRIC] = 0
    with new_namespace(cluster, "scaling") as namespace:
        scaling = {"minReplicas": 1, "maxReplicas": 2, "targetTokens": TARGET_TOKENS, "scaleDownSeconds": 0}
        deployed = Deployed.apply(cluster, prism_deployment("scaled", namespace, autoscaling=scaling))
        deployed.wait("Ready")
        deployed.wait("AutoscalingReady", reason="Scaling")
        yield deployed
        deployed.delete("--wait=false")


def is_at(deployed: Deployed, replicas: int) -> bool:
    """As asked for, and as many pods."""
    asked: int = deployed.read()["spec"]["replicas"]
    return asked == replicas == len(deployed.engines())


def test_an_autoscaler_follows_the_load_up_and_down_and_an_operators_restart_changes_nothing(
    scaled: Deployed, operator: str, pod_metrics: dict[str, float]
) -> None:
    cluster = scaled.cluster
    pod_metrics[METRIC] = 1.9 * TARGET_TOKENS
    eventually("two engines", lambda: is_at(scaled, 2))
    scaled.wait("Ready")
    assert scaled.status["replicas"] == 2

    pod_metrics[METRIC] = 0.9 * TARGET_TOKENS
    before = {pod["metadata"]["uid"] for pod in scaled.engines()}
    cluster.kubectl("rollout", "restart", "-n", operator, "deployment/prism-operator")
    cluster.kubectl("rollout", "status", "-n", operator, "deployment/prism-operator", WAIT)
    time.sleep(RESYNCS_S)
    assert is_at(scaled, 2)
    assert {pod["metadata"]["uid"] for pod in scaled.engines()} == before

    pod_metrics[METRIC] = 0
    eventually("one engine", lambda: is_at(scaled, 1))
    scaled.wait("Ready")
