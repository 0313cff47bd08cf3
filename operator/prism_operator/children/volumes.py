"""Volumes of pods, each with its mount."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prism_operator.children import names
from prism_operator.children.memory import shared_memory_bytes
from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.deployment import Deployment

TMP_SIZE = "2Gi"
HOME_SIZE = "1Gi"
CACHE_SIZE = "8Gi"
"""Kernels that are compiled on the card."""


@dataclass(frozen=True, slots=True)
class Volume:
    """`source` is a Kubernetes volume source such as `{"emptyDir": {...}}`."""

    name: str
    path: str
    source: dict[str, Any]
    read_only: bool = False

    @property
    def volume(self) -> dict[str, Any]:
        return {"name": self.name, **self.source}

    @property
    def mount(self) -> dict[str, Any]:
        mount: dict[str, Any] = {"name": self.name, "mountPath": self.path}
        return mount | {"readOnly": True} if self.read_only else mount


def admin_token_volume(deployment: Deployment) -> Volume:
    """The token of `/internal/*`: engines and routers check it, and routers show it to engines."""
    token = {"secretName": names.admin_token(deployment), "defaultMode": 0o440}
    return Volume("admin-token", names.ADMIN_TOKEN_DIR, {"secret": token}, read_only=True)


def engine_volumes(deployment: Deployment, config_name: str) -> list[Volume]:
    spec = deployment.spec
    volumes = [
        Volume("config", names.CONFIG_DIR, {"configMap": {"name": config_name}}, read_only=True),
        admin_token_volume(deployment),
        Volume("tmp", "/tmp", _empty_dir(TMP_SIZE)),
        Volume("home", names.HOME_DIR, _empty_dir(HOME_SIZE)),
        Volume("cache", names.CACHE_DIR, _empty_dir(CACHE_SIZE)),
    ]
    if spec.auth.api_keys_secret:
        keys = {"secretName": spec.auth.api_keys_secret, "defaultMode": 0o440}
        volumes.append(Volume("api-keys", names.API_KEYS_DIR, {"secret": keys}, read_only=True))
    if shared := shared_memory_bytes(spec):
        volumes.append(Volume("shm", "/dev/shm", _empty_dir(f"{shared >> 20}Mi", medium="Memory")))
    if source := _model_source(deployment, spec):
        volumes.append(Volume("model", names.MODEL_DIR, source, read_only=True))
    return volumes


def model_claim(deployment: Deployment) -> str:
    """The claim that a Hugging Face model is kept in."""
    hub = deployment.spec.model.source.hugging_face
    assert hub is not None
    return hub.storage.claim_name or names.model_store(deployment)


def _model_source(deployment: Deployment, spec: PrismDeploymentSpec) -> dict[str, Any] | None:
    """None for the demo, which the image holds."""
    source = spec.model.source
    if source.pvc is not None:
        return {"persistentVolumeClaim": {"claimName": source.pvc.claim_name, "readOnly": True}}
    if source.host_path is not None:
        return {"hostPath": {"path": source.host_path.path, "type": "Directory"}}
    if source.image is not None:
        return {"image": {"reference": source.image.reference, "pullPolicy": source.image.pull_policy}}
    if source.hugging_face is not None:
        return {"persistentVolumeClaim": {"claimName": model_claim(deployment), "readOnly": True}}
    return None


def _empty_dir(size: str, **fields: str) -> dict[str, Any]:
    return {"emptyDir": {**fields, "sizeLimit": size}}
