"""Tells the Prometheus operator where the pods' metrics are."""

from __future__ import annotations

from typing import Any

from prism_operator.children.labels import Component, child, selector
from prism_operator.deployment import Deployment

MONITORING_API = "monitoring.coreos.com/v1"


def pod_monitor(deployment: Deployment, name: str, component: Component) -> dict[str, Any]:
    """With `monitoring.labels`, by which a Prometheus finds it; those that mark it as a child stand."""
    spec = {
        "selector": {"matchLabels": selector(deployment, component)},
        "podMetricsEndpoints": [{"port": "admin", "path": "/metrics"}],
    }
    made = child(deployment, MONITORING_API, "PodMonitor", name, component, spec=spec)
    made["metadata"]["labels"] = {**deployment.spec.monitoring.labels, **made["metadata"]["labels"]}
    return made
