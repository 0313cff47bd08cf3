"""PrismDeployments for the tests, as people write them."""

from __future__ import annotations

from typing import Any

from prism_operator.deployment import Deployment

DEMO: dict[str, Any] = {"model": {"source": {"demo": {}}}, "engine": {"device": "cpu"}}
HUB: dict[str, Any] = {"model": {"source": {"huggingFace": {"repository": "Qwen/Qwen3-VL-8B-Instruct"}}}}


def deployment(spec: dict[str, Any], name: str = "contracts", uid: str = "uid-1", generation: int = 1) -> Deployment:
    metadata = {"name": name, "namespace": "team", "uid": uid, "generation": generation}
    return Deployment.from_object({"metadata": metadata, "spec": spec})


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """`base` with the values of `change`, group by group."""
    result = dict(base)
    for key, value in change.items():
        inner = result.get(key)
        result[key] = merged(inner, value) if isinstance(value, dict) and isinstance(inner, dict) else value
    return result
