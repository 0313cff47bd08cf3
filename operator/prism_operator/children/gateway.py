"""The engine pods as the Gateway API's inference extension names them."""

from __future__ import annotations

from typing import Any

from prism_operator.children import names
from prism_operator.children.labels import child, selector
from prism_operator.crd.network import InferencePoolSpec
from prism_operator.deployment import Deployment

INFERENCE_API = "inference.networking.k8s.io/v1"


def inference_pool(deployment: Deployment, pool: InferencePoolSpec) -> dict[str, Any]:
    """Gateways reach the engines' api port directly: requests go past the routers."""
    picker = pool.endpoint_picker_ref
    spec = {
        "selector": {"matchLabels": selector(deployment, "engine")},
        "targetPorts": [{"number": names.API_PORT}],
        "endpointPickerRef": {
            "group": "",
            "kind": "Service",
            "name": picker.name,
            "port": {"number": picker.port},
            "failureMode": picker.failure_mode,
        },
    }
    return child(deployment, INFERENCE_API, "InferencePool", names.inference_pool(deployment), spec=spec)
