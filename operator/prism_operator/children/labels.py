"""Metadata of children: who made them, whose they are, which part they play."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from prism_operator.children import names
from prism_operator.crd.base import GROUP, KIND, VERSION
from prism_operator.deployment import LABEL_CLASS, LABEL_COMPONENT, LABEL_DEPLOYMENT, MANAGED_BY, Deployment

Component = Literal["engine", "router", "loader"]


def selector(deployment: Deployment, component: Component) -> dict[str, str]:
    """What selects the pods of one part; immutable in a StatefulSet, so it holds nothing that may change."""
    return {LABEL_DEPLOYMENT: names.stem(deployment), LABEL_COMPONENT: component}


def labels(deployment: Deployment, component: Component) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "prism",
        "app.kubernetes.io/instance": names.stem(deployment),
        "app.kubernetes.io/managed-by": MANAGED_BY,
        LABEL_CLASS: deployment.spec.operator_class,
        **selector(deployment, component),
    }


def spread(deployment: Deployment, component: Component) -> list[dict[str, Any]]:
    """Over nodes where that is possible; a pod that must share one is better than none."""
    constraint = {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": selector(deployment, component)},
    }
    return [constraint]


def owner_reference(deployment: Deployment) -> dict[str, Any]:
    """Children go with their PrismDeployment by garbage collection; nothing ever waits for the operator."""
    return {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": KIND,
        "name": deployment.name,
        "uid": deployment.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def child(
    deployment: Deployment,
    api_version: str,
    kind: str,
    name: str,
    component: Component = "engine",
    annotations: Mapping[str, str] | None = None,
    **body: Any,
) -> dict[str, Any]:
    """One object with its metadata; `body` are its further fields."""
    metadata: dict[str, Any] = {
        "name": name,
        "namespace": deployment.namespace,
        "labels": labels(deployment, component),
        "ownerReferences": [owner_reference(deployment)],
    }
    if annotations:
        metadata["annotations"] = dict(annotations)
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **body}
