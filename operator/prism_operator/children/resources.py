"""Memory, cards and shared memory of containers."""

from __future__ import annotations

from typing import Any

from prism_operator.children.memory import engine_memory_bytes, shared_memory_bytes
from prism_operator.crd.quantity import amount_of
from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.refused import Refused

ROUTER_BYTES = 256 << 20
"""Asked for when the spec says nothing: the interpreter, the index of what caches hold, and some bodies under way."""


def engine_resources(spec: PrismDeploymentSpec, template_version: int) -> dict[str, Any]:
    """`podTemplate.resources` as they are, with the cards, and a memory request where it names none.

    `/dev/shm` counts against the container's memory limit, so it is added to the memory that the spec gives. On
    `device: cpu` no card is asked for, beyond what `podTemplate.resources` itself names.
    """
    given = spec.pod_template.resources
    shared = shared_memory_bytes(spec)
    requests, limits = (_part(given, part, "podTemplate") for part in ("requests", "limits"))
    for part in (requests, limits):
        if "memory" in part and shared:
            part["memory"] = _mebibytes(_memory_bytes(part["memory"], "podTemplate") + shared)
    if "memory" not in requests and "memory" not in limits:
        requests["memory"] = _mebibytes(engine_memory_bytes(spec, template_version))
    if spec.engine.device != "cpu":
        limits[spec.gpu.resource_name] = str(spec.engine.tensor_parallel)
        requests.pop(spec.gpu.resource_name, None)
    resources = {**given, "requests": requests, "limits": limits}
    return {key: value for key, value in resources.items() if value}


def router_resources(spec: PrismDeploymentSpec) -> dict[str, Any]:
    """`router.podTemplate.resources` as they are, with a memory request where it names none."""
    given = spec.router.pod_template.resources
    requests, limits = (_part(given, part, "router.podTemplate") for part in ("requests", "limits"))
    if "memory" not in requests and "memory" not in limits:
        requests["memory"] = _mebibytes(ROUTER_BYTES)
    resources = {**given, "requests": requests, "limits": limits}
    return {key: value for key, value in resources.items() if value}


def router_memory_limit_bytes(spec: PrismDeploymentSpec) -> int:
    """0: none."""
    limits = _part(spec.router.pod_template.resources, "limits", "router.podTemplate")
    return _memory_bytes(limits["memory"], "router.podTemplate") if "memory" in limits else 0


def _part(given: dict[str, Any], name: str, field: str) -> dict[str, Any]:
    part = given.get(name) or {}
    if not isinstance(part, dict):
        raise Refused("InvalidResources", f"{field}.resources.{name} must be an object of quantities")
    return dict(part)


def _memory_bytes(quantity: Any, field: str) -> int:
    try:
        return int(amount_of(quantity))
    except ValueError as error:
        raise Refused("InvalidResources", f"{field}.resources: memory: {error}") from None


def _mebibytes(num_bytes: int) -> str:
    return f"{-(-num_bytes // (1 << 20))}Mi"
