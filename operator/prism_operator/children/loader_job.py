"""The Job that downloads a model, and the claim that keeps it."""

from __future__ import annotations

import json
from typing import Any

from prism_operator.children import names
from prism_operator.children.labels import child, labels
from prism_operator.children.security import container_security, pod_security
from prism_operator.children.volumes import Volume, model_claim
from prism_operator.crd.sources import HuggingFaceSource
from prism_operator.deployment import Deployment
from prism_operator.options import OperatorOptions

RETRIES = 100_000
"""For ever, with the kubelet's back-off: a token or a disk that is put right needs nobody to start the Job again."""


def model_store(deployment: Deployment, hub: HuggingFaceSource) -> dict[str, Any]:
    storage = hub.storage
    spec: dict[str, Any] = {
        "accessModes": [storage.access_mode],
        "resources": {"requests": {"storage": storage.size}},
    }
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    return child(deployment, "v1", "PersistentVolumeClaim", names.model_store(deployment), "loader", spec=spec)


def loader_job(deployment: Deployment, options: OperatorOptions, hub: HuggingFaceSource) -> dict[str, Any]:
    """One Job per (repository, revision, endpoint, token, claim, place). Its template is immutable: it is created,
    never patched, and an operator with another loader image leaves a Job that is there as it is."""
    token = hub.token_secret.model_dump() if hub.token_secret else None
    what = [hub.repository, hub.revision, hub.endpoint, token, model_claim(deployment), _place(deployment)]
    inputs = json.dumps(what, sort_keys=True)
    spec = {
        "backoffLimit": RETRIES,
        "template": {"metadata": {"labels": labels(deployment, "loader")}, "spec": _pod_spec(deployment, options, hub)},
    }
    return child(deployment, "batch/v1", "Job", names.loader_job(deployment, inputs), "loader", spec=spec)


def _pod_spec(deployment: Deployment, options: OperatorOptions, hub: HuggingFaceSource) -> dict[str, Any]:
    store = Volume("model", names.MODEL_DIR, {"persistentVolumeClaim": {"claimName": model_claim(deployment)}})
    return {
        "restartPolicy": "OnFailure",
        "serviceAccountName": names.engine(deployment),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": pod_security(),
        "containers": [_container(options.loader_image, hub, store)],
        "volumes": [store.volume],
        **_place(deployment),
    }


def _place(deployment: Deployment) -> dict[str, Any]:
    """Where engines may run: a volume that is bound by its first pod must be in their reach."""
    asked = deployment.spec.pod_template
    passed_through = {
        "nodeSelector": asked.node_selector,
        "tolerations": asked.tolerations,
        "affinity": asked.affinity,
        "imagePullSecrets": [{"name": name} for name in asked.image_pull_secrets],
    }
    return {key: value for key, value in passed_through.items() if value}


def _container(image: str, hub: HuggingFaceSource, store: Volume) -> dict[str, Any]:
    """The only one that ever sees the token."""
    directory = f"{names.MODEL_DIR}/{names.model_directory(hub.repository, hub.revision)}"
    container: dict[str, Any] = {
        "name": "loader",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "prism_operator.loader"],
        "args": [
            f"--repository={hub.repository}",
            f"--revision={hub.revision}",
            f"--endpoint={hub.endpoint}",
            f"--directory={directory}",
        ],
        "resources": {"requests": {"cpu": "100m", "memory": "128Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": container_security(read_only_root=True),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [store.mount],
    }
    if hub.token_secret is not None:
        reference = {"name": hub.token_secret.name, "key": hub.token_secret.key}
        container["env"] = [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": reference}}]
    return container
