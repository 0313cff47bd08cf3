"""The identity of pods: one that the API server gives no token to."""

from __future__ import annotations

from typing import Any

from prism_operator.children import names
from prism_operator.children.labels import child
from prism_operator.deployment import Deployment


def service_account(deployment: Deployment) -> dict[str, Any]:
    return child(deployment, "v1", "ServiceAccount", names.engine(deployment), automountServiceAccountToken=False)
