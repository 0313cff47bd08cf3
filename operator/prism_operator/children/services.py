"""The headless Service that names engine pods, and the Service that users call."""

from __future__ import annotations

from typing import Any

from prism_operator.children import names
from prism_operator.children.labels import child, selector
from prism_operator.deployment import Deployment


def headless_service(deployment: Deployment) -> dict[str, Any]:
    """Stable names for pods, ready or not: whoever probes a pod must find it before it is ready."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": selector(deployment, "engine"),
        "ports": [_port("api", names.API_PORT, "api"), _port("admin", names.ADMIN_PORT, "admin")],
    }
    return child(deployment, "v1", "Service", names.engine(deployment), spec=spec)


def user_service(deployment: Deployment) -> dict[str, Any]:
    """To the `api` port of the routers that are ready."""
    service = deployment.spec.service
    spec = {
        "type": service.type,
        "selector": selector(deployment, "router"),
        "ports": [_port("http", service.port, "api")],
    }
    name = names.service(deployment)
    return child(deployment, "v1", "Service", name, "router", annotations=service.annotations, spec=spec)


def _port(name: str, port: int, target: str) -> dict[str, Any]:
    return {"name": name, "port": port, "targetPort": target, "protocol": "TCP", "appProtocol": "http"}
