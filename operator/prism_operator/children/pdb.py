"""How many pods of one part may be disrupted at once."""

from __future__ import annotations

from typing import Any

from prism_operator.children.labels import Component, child, selector
from prism_operator.deployment import Deployment


def disruption_budget(deployment: Deployment, name: str, component: Component) -> dict[str, Any]:
    """One at a time, even of one replica: a node's drain is never blocked. Broken pods may always be evicted."""
    spec = {
        "maxUnavailable": 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": selector(deployment, component)},
    }
    return child(deployment, "policy/v1", "PodDisruptionBudget", name, component, spec=spec)
