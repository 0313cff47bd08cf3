"""The identity of pods: engines' one that the API server gives no token to, and routers' that may see one thing."""

from __future__ import annotations

from typing import Any

from prism_operator.children import names
from prism_operator.children.labels import child
from prism_operator.deployment import Deployment

RBAC_API = "rbac.authorization.k8s.io/v1"


def service_account(deployment: Deployment) -> dict[str, Any]:
    return child(deployment, "v1", "ServiceAccount", names.engine(deployment), automountServiceAccountToken=False)


def router_identity(deployment: Deployment) -> list[dict[str, Any]]:
    """Account, role and binding: the namespace's EndpointSlices, which are where the engines' addresses are."""
    name = names.router(deployment)
    rule = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"], "verbs": ["get", "list", "watch"]}
    role = {"apiGroup": RBAC_API.partition("/")[0], "kind": "Role", "name": name}
    subject = {"kind": "ServiceAccount", "name": name, "namespace": deployment.namespace}
    return [
        child(deployment, "v1", "ServiceAccount", name, "router", automountServiceAccountToken=False),
        child(deployment, RBAC_API, "Role", name, "router", rules=[rule]),
        child(deployment, RBAC_API, "RoleBinding", name, "router", roleRef=role, subjects=[subject]),
    ]
