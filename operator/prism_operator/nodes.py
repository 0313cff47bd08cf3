"""Facts about nodes: which an engine pod can run on, and how much memory a card there has."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.refused import Refused
from prism_server.capacity.units import MIB

MEMORY_LABEL = "nvidia.com/gpu.memory"
"""MiB of one card, written by the GPU feature discovery."""
PRODUCT_LABEL = "nvidia.com/gpu.product"
STRATEGY_LABEL = "nvidia.com/gpu.sharing-strategy"
REPLICAS_LABEL = "nvidia.com/gpu.replicas"
HOSTNAME_LABEL = "kubernetes.io/hostname"
SHARED_SUFFIX = "-SHARED"
SHARING_STRATEGIES = ("time-slicing", "mps")

PRODUCT_MIB = {
    "B200": 183359,
    "H200": 143771,
    "H100-NVL": 95830,
    "GH200": 97871,
    "H100": 81559,
    "A100-80GB": 81920,
    "A100-SXM4-80GB": 81920,
    "A100": 40536,
    "A40": 46068,
    "A30": 24576,
    "A10G": 23028,
    "A10": 23028,
    "L40S": 46068,
    "L40": 46068,
    "L4": 23034,
    "T4": 15360,
    "RTX-PRO-6000": 97887,
    "RTX-6000-Ada": 49140,
    "RTX-A6000": 49140,
    "RTX-5090": 32607,
    "RTX-4090": 24564,
    "RTX-3090": 24576,
}
"""MiB that the driver reports, for nodes without the memory label. The longest name found in the product counts."""
_MIG_PROFILE = re.compile(r"mig-\d+g\.(\d+)gb")
_MIG_PRODUCT = re.compile(r"-MIG-\d+g\.(\d+)gb", re.IGNORECASE)
MIG_MIB_PER_GB = 973
"""A slice's name rounds up: `1g.10gb` has at least 9.5 GiB."""


@dataclass(frozen=True, slots=True)
class Taint:
    key: str
    value: str
    effect: str


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What the plan needs of a node. `ready` decides nothing here: a plan is not about this minute."""

    name: str
    ready: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    allocatable: Mapping[str, int] = field(default_factory=dict)
    """Extended resources (cards, slices), by name."""
    taints: tuple[Taint, ...] = ()

    @classmethod
    def from_object(cls, body: Mapping[str, Any]) -> NodeFacts:
        """From the API server's Node."""
        status, spec = body.get("status") or {}, body.get("spec") or {}
        conditions = {c["type"]: c["status"] for c in status.get("conditions") or ()}
        amounts = {name: str(amount) for name, amount in (status.get("allocatable") or {}).items()}
        return cls(
            name=body["metadata"]["name"],
            ready=conditions.get("Ready") == "True",
            labels=body["metadata"].get("labels") or {},
            allocatable={name: int(text) for name, text in amounts.items() if "/" in name and text.isdigit()},
            taints=tuple(Taint(t["key"], t.get("value") or "", t["effect"]) for t in spec.get("taints") or ()),
        )


def eligible_nodes(spec: PrismDeploymentSpec, nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    """Nodes that have the cards and that selector, required affinity and tolerations let an engine pod onto.

    Raises Refused (`InvalidAffinity`) for a node affinity that no API server would take.
    """
    try:
        return _eligible(spec, nodes)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # passed through as it was written
        raise Refused("InvalidAffinity", f"podTemplate.affinity.nodeAffinity cannot be read: {error!r}") from None


def _eligible(spec: PrismDeploymentSpec, nodes: Sequence[NodeFacts]) -> list[NodeFacts]:
    template, gpu = spec.pod_template, spec.gpu
    affinity = (template.affinity.get("nodeAffinity") or {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = (affinity or {}).get("nodeSelectorTerms")
    return [
        node
        for node in nodes
        if node.allocatable.get(gpu.resource_name, 0) >= spec.engine.tensor_parallel
        and all(node.labels.get(key) == value for key, value in template.node_selector.items())
        and (terms is None or any(_matches_term(node, term) for term in terms))
        and all(_is_tolerated(taint, spec) for taint in node.taints)
    ]


def _matches_term(node: NodeFacts, term: Mapping[str, Any]) -> bool:
    """A term without any requirement selects nothing, as the scheduler has it."""
    expressions, fields = term.get("matchExpressions") or (), term.get("matchFields") or ()
    by_name = {"metadata.name": node.name}
    return bool(expressions or fields) and (
        all(_matches(node.labels, expression) for expression in expressions)
        and all(_matches(by_name, expression) for expression in fields)
    )


def _matches(labels: Mapping[str, str], expression: Mapping[str, Any]) -> bool:
    value, values = labels.get(expression["key"]), expression.get("values") or []
    match expression["operator"]:
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" if value is not None and value.lstrip("-").isdigit() and len(values) == 1:
            difference = int(value) - int(values[0])
            return difference > 0 if expression["operator"] == "Gt" else difference < 0
    return False


def _is_tolerated(taint: Taint, spec: PrismDeploymentSpec) -> bool:
    """Taints of a node's health or drain say nothing about its cards. The one named like the resource is tolerated by
    an admission plugin of many clusters; where there is none, the scheduler says so."""
    if taint.effect == "PreferNoSchedule" or taint.key.startswith("node.kubernetes.io/"):
        return True
    return taint.key == spec.gpu.resource_name or any(
        toleration.get("effect") in (None, "", taint.effect)
        and toleration.get("key") in (None, "", taint.key)
        and (toleration.get("operator") == "Exists" or (toleration.get("value") or "") == taint.value)
        for toleration in spec.pod_template.tolerations
    )


def is_shared(node: NodeFacts, resource_name: str) -> bool:
    """Time slices and MPS: the card's whole memory shows on the node and in each pod, but several use it.

    The strategy is the node's; of slices (MIG) beside whole cards their own label says whether it holds for them.
    """
    labels = node.labels
    replicas, of_slices = labels.get(REPLICAS_LABEL, ""), labels.get(f"{resource_name}.replicas", "")
    if "mig-" in resource_name and of_slices.isdigit():
        return int(of_slices) > 1
    return (
        labels.get(STRATEGY_LABEL, "none") not in ("none", "")
        or (replicas.isdigit() and int(replicas) > 1)
        or labels.get(PRODUCT_LABEL, "").endswith(SHARED_SUFFIX)
        or resource_name.endswith(".shared")
    )


def card_memory_bytes(node: NodeFacts, resource_name: str) -> int | None:
    """Of one card, or one slice, of that resource: by label, else by the slice's or the product's name, else None."""
    labels = node.labels
    if slice_gb := _MIG_PROFILE.search(resource_name):
        return _label_bytes(labels, f"{resource_name}.memory") or _slice_bytes(slice_gb)
    product = labels.get(PRODUCT_LABEL, "").removesuffix(SHARED_SUFFIX)
    if labelled := _label_bytes(labels, MEMORY_LABEL):
        return labelled
    if slice_gb := _MIG_PRODUCT.search(product):
        return _slice_bytes(slice_gb)
    return _product_bytes(product)


def _label_bytes(labels: Mapping[str, str], label: str) -> int | None:
    """None for a label that is missing or says nothing: broken drivers have been seen to write 0."""
    text = labels.get(label, "")
    return int(text) * MIB or None if text.isdigit() else None


def _slice_bytes(match: re.Match[str]) -> int:
    return int(match[1]) * MIG_MIB_PER_GB * MIB


def _product_bytes(product: str) -> int | None:
    """A name counts where it stands between dashes: `L4` is not in `NVIDIA-L40S`."""
    framed = f"-{product}-".upper()
    found = [name for name in PRODUCT_MIB if f"-{name}-".upper() in framed]
    return PRODUCT_MIB[max(found, key=len)] * MIB if found else None
