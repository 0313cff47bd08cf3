"""The Deployment of router pods, and what gives them the right to see where engines are."""

from __future__ import annotations

from typing import Any

from prism_operator.children import names
from prism_operator.children.grace import router_grace_s
from prism_operator.children.labels import child, labels, selector, spread
from prism_operator.children.resources import router_resources
from prism_operator.children.router_flags import router_flags
from prism_operator.children.security import container_security, pod_security
from prism_operator.children.versions import ROUTER
from prism_operator.children.volumes import Volume, admin_token_volume
from prism_operator.deployment import ANNOTATION_TEMPLATE_VERSION, Deployment
from prism_operator.options import OperatorOptions

REVISION_HISTORY = 2
MIN_READY_S = 2
"""Until every node's proxy has heard of a router that is ready. Before that it does not count: no old one goes, and
`Ready` is not said."""


def router_deployment(deployment: Deployment, options: OperatorOptions, template_version: int) -> dict[str, Any]:
    """A new pod is ready before an old one goes: routers need no card, so a surge costs nothing."""
    spec = {
        "replicas": deployment.spec.router.replicas,
        "revisionHistoryLimit": REVISION_HISTORY,
        "minReadySeconds": MIN_READY_S,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "selector": {"matchLabels": selector(deployment, "router")},
        "template": pod_template(deployment, options, template_version),
    }
    annotations = ROUTER.annotations(deployment, options, template_version)
    name = names.router(deployment)
    return child(deployment, "apps/v1", "Deployment", name, "router", annotations=annotations, spec=spec)


def pod_template(deployment: Deployment, options: OperatorOptions, template_version: int) -> dict[str, Any]:
    asked = deployment.spec.router.pod_template
    annotations = {**asked.annotations, ANNOTATION_TEMPLATE_VERSION: str(template_version)}
    return {
        "metadata": {"labels": {**asked.labels, **labels(deployment, "router")}, "annotations": annotations},
        "spec": _pod_spec(deployment, options),
    }


def _pod_spec(deployment: Deployment, options: OperatorOptions) -> dict[str, Any]:
    asked = deployment.spec.router.pod_template
    token = admin_token_volume(deployment)
    pull_secrets = asked.image_pull_secrets or deployment.spec.pod_template.image_pull_secrets
    pod: dict[str, Any] = {
        "serviceAccountName": names.router(deployment),
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        # the first process of a namespace does not hear SIGTERM before it has a handler: told to go in its first
        # moment, while Python itself starts, a router would stay for all of its grace
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": router_grace_s(deployment.spec),
        "securityContext": pod_security(),
        "topologySpreadConstraints": spread(deployment, "router"),
        "containers": [_container(deployment, options, token)],
        "volumes": [token.volume],
    }
    passed_through = {
        "nodeSelector": asked.node_selector,
        "tolerations": asked.tolerations,
        "affinity": asked.affinity,
        "priorityClassName": asked.priority_class_name,
        "imagePullSecrets": [{"name": name} for name in pull_secrets],
    }
    return pod | {key: value for key, value in passed_through.items() if value}


def _container(deployment: Deployment, options: OperatorOptions, token: Volume) -> dict[str, Any]:
    image = deployment.spec.router.image
    return {
        "name": names.ROUTER_CONTAINER,
        "image": image.reference or options.router_image,
        "imagePullPolicy": image.pull_policy,
        "command": ["prism-router"],
        "args": router_flags(deployment),
        "ports": [
            {"name": "api", "containerPort": names.API_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": names.ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": router_resources(deployment.spec),
        "securityContext": container_security(read_only_root=True),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [token.mount],
        "readinessProbe": _probe("/readyz", "api", period_s=2, failures=3),
        "livenessProbe": _probe("/livez", "admin", period_s=10, failures=6),  # a draining router has no api port
    }


def _probe(path: str, port: str, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
