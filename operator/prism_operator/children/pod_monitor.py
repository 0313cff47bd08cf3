"""Tells the Prometheus operator where the engines' metrics are."""

from __future__ import annotations

from typing import Any

from prism_operator.children import names
from prism_operator.children.labels import child, selector
from prism_operator.deployment import Deployment

MONITORING_API = "monitoring.coreos.com/v1"


def pod_monitor(deployment: Deployment) -> dict[str, Any]:
    """With `monitoring.labels`, by which a Prometheus finds it; those that mark it as a child stand."""
    spec = {
        "selector": {"matchLabels": selector(deployment, "engine")},
        "podMetricsEndpoints": [{"port": "admin", "path": "/metrics"}],
    }
    made = child(deployment, MONITORING_API, "PodMonitor", names.engine(deployment), spec=spec)
    made["metadata"]["labels"] = {**deployment.spec.monitoring.labels, **made["metadata"]["labels"]}
    return made
