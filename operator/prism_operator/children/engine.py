"""The StatefulSet of engine pods. Its pod template depends on the spec, the default image and its version alone."""

from __future__ import annotations

from typing import Any

from prism_operator.children import config, names
from prism_operator.children.grace import engine_grace_s
from prism_operator.children.labels import child, labels, selector, spread
from prism_operator.children.resources import engine_resources
from prism_operator.children.security import container_security, pod_security
from prism_operator.children.versions import ENGINE
from prism_operator.children.volumes import Volume, engine_volumes
from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.deployment import ANNOTATION_TEMPLATE_VERSION, Deployment
from prism_operator.options import OperatorOptions

STARTUP_PERIOD_S = 2
REVISION_HISTORY = 2


def stateful_set(deployment: Deployment, options: OperatorOptions, template_version: int) -> dict[str, Any]:
    """All pods at once, and never rolled by the controller: the operator evicts them one by one."""
    spec = {
        "replicas": deployment.spec.replicas,
        "serviceName": names.engine(deployment),
        "podManagementPolicy": "Parallel",
        "updateStrategy": {"type": "OnDelete"},
        "revisionHistoryLimit": REVISION_HISTORY,
        "selector": {"matchLabels": selector(deployment, "engine")},
        "template": pod_template(deployment, options, template_version),
    }
    annotations = ENGINE.annotations(deployment, options, template_version)
    return child(deployment, "apps/v1", "StatefulSet", names.engine(deployment), annotations=annotations, spec=spec)


def pod_template(deployment: Deployment, options: OperatorOptions, template_version: int) -> dict[str, Any]:
    asked = deployment.spec.pod_template
    annotations = {**asked.annotations, ANNOTATION_TEMPLATE_VERSION: str(template_version)}
    return {
        "metadata": {"labels": {**asked.labels, **labels(deployment, "engine")}, "annotations": annotations},
        "spec": _pod_spec(deployment, options, template_version),
    }


def _pod_spec(deployment: Deployment, options: OperatorOptions, template_version: int) -> dict[str, Any]:
    spec = deployment.spec
    asked = spec.pod_template
    config_name = names.config(deployment, config.config_text(spec))
    volumes = engine_volumes(deployment, config_name)
    image_reference = spec.image.reference or ENGINE.default_image(deployment, options)
    pod: dict[str, Any] = {
        "serviceAccountName": names.engine(deployment),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": engine_grace_s(spec),
        "securityContext": pod_security(),
        "topologySpreadConstraints": spread(deployment, "engine"),
        "containers": [_container(spec, image_reference, engine_resources(spec, template_version), volumes)],
        "volumes": [volume.volume for volume in volumes],
    }
    passed_through = {
        "nodeSelector": asked.node_selector,
        "tolerations": asked.tolerations,
        "affinity": asked.affinity,
        "priorityClassName": asked.priority_class_name,
        "runtimeClassName": asked.runtime_class_name,
        "imagePullSecrets": [{"name": name} for name in asked.image_pull_secrets],
    }
    return pod | {key: value for key, value in passed_through.items() if value}


def _container(
    spec: PrismDeploymentSpec, image_reference: str, resources: dict[str, Any], volumes: list[Volume]
) -> dict[str, Any]:
    return {
        "name": names.CONTAINER,
        "image": image_reference,
        "imagePullPolicy": spec.image.pull_policy,
        "command": ["prism-serve"],
        "args": ["--config", f"{names.CONFIG_DIR}/{names.CONFIG_KEY}"],
        "env": _environment(),
        "ports": [
            {"name": "api", "containerPort": names.API_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": names.ADMIN_PORT, "protocol": "TCP"},
        ],
        "resources": resources,
        "securityContext": container_security(_has_read_only_root(spec)),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [volume.mount for volume in volumes],
        **_probes(spec),
    }


def _has_read_only_root(spec: PrismDeploymentSpec) -> bool:
    asked = spec.pod_template.read_only_root_filesystem
    return spec.engine.device == "cpu" if asked is None else asked


def _environment() -> list[dict[str, str]]:
    """Nothing is downloaded by engines, and what they write goes to volumes."""
    values = {
        "HOME": names.HOME_DIR,
        "HF_HUB_OFFLINE": "1",
        "XDG_CACHE_HOME": names.CACHE_DIR,
        "TRITON_CACHE_DIR": f"{names.CACHE_DIR}/triton",
        "TORCHINDUCTOR_CACHE_DIR": f"{names.CACHE_DIR}/inductor",
        "FLASHINFER_WORKSPACE_BASE": names.CACHE_DIR,
        "CUDA_CACHE_PATH": f"{names.CACHE_DIR}/cuda",
    }
    return [{"name": name, "value": value} for name, value in values.items()]


def _probes(spec: PrismDeploymentSpec) -> dict[str, Any]:
    """Unready within 9 s, inside the default propagation; slow answers alone restart nothing for a minute."""
    startup_checks = -(-spec.startup.timeout_seconds // STARTUP_PERIOD_S)
    return {
        "startupProbe": _probe("/startupz", period_s=STARTUP_PERIOD_S, failures=startup_checks),
        "readinessProbe": _probe("/readyz", period_s=3, failures=3),
        "livenessProbe": _probe("/livez", period_s=10, failures=6),
    }


def _probe(path: str, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "api"},
        "periodSeconds": period_s,
        "timeoutSeconds": 5,
        "failureThreshold": failures,
    }
