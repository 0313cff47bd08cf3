"""One PrismDeployment as the operator handles it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prism_operator.crd.base import DEFAULT_CLASS
from prism_operator.crd.spec import PrismDeploymentSpec

MANAGED_BY = "prism-operator"
"""Field manager of server-side apply, and the value of `app.kubernetes.io/managed-by` on every child."""
LABEL_DEPLOYMENT = "prism-infer.io/deployment"
LABEL_COMPONENT = "app.kubernetes.io/component"
LABEL_CLASS = "prism-infer.io/operator-class"
ANNOTATION_TEMPLATE_VERSION = "prism-infer.io/template-version"
TEMPLATE_VERSIONS = (2, 3)
"""Versions of the engines' pod template that this operator can render, oldest first: N - 1 and N."""
ROUTER_TEMPLATE_VERSIONS = (1,)
"""The same of the routers' pod template."""


def class_of(body: Mapping[str, Any]) -> str:
    """The operator class of a PrismDeployment, whose spec may be one that this operator cannot read."""
    return str(body.get("spec", {}).get("operatorClass", DEFAULT_CLASS))


@dataclass(frozen=True, slots=True)
class Deployment:
    """Identity and parsed spec."""

    name: str
    namespace: str
    uid: str
    generation: int
    spec: PrismDeploymentSpec
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_object(cls, body: Mapping[str, Any]) -> Deployment:
        """From the API server's object. Raises pydantic.ValidationError for a spec that this operator cannot read."""
        metadata = body["metadata"]
        return cls(
            name=metadata["name"],
            namespace=metadata["namespace"],
            uid=metadata["uid"],
            generation=metadata.get("generation", 1),
            spec=PrismDeploymentSpec.parse(body["spec"]),
            labels=metadata.get("labels") or {},
            annotations=metadata.get("annotations") or {},
        )
