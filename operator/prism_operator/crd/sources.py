"""Where a model comes from: exactly one of the sources."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from prism_operator.crd.base import AbsolutePath, ImageReference, Model, Name, Quantity, RelativePath


class DemoSource(Model):
    """The model that is bundled in the image."""


class PVCSource(Model):
    """A directory of an existing claim, mounted read-only."""

    claim_name: Name = Field(description="PersistentVolumeClaim in the same namespace")
    path: RelativePath = Field(default="", description="the checkpoint's directory inside the volume")


class HostPathSource(Model):
    """A directory of the node; only where the operator runs with `allowHostPath`."""

    path: AbsolutePath = Field(description="the checkpoint's directory on every node that may run an engine")


class ImageSource(Model):
    """An OCI image whose files are the checkpoint (Kubernetes image volumes)."""

    reference: Annotated[ImageReference, Field(min_length=1, description="the image, as in a container")]
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="when it is pulled"
    )
    path: RelativePath = Field(default="", description="the checkpoint's directory inside the image")


class SecretKey(Model):
    """One key of a Secret in the same namespace."""

    name: Name = Field(description="name of the Secret")
    key: Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")] = Field(
        default="token", description="key in the Secret"
    )


class StorageSpec(Model):
    """The claim that a download is kept in; made by the operator unless `claimName` names one."""

    claim_name: Name | None = Field(
        default=None, description="an existing claim to use; the fields below then say nothing"
    )
    size: Quantity = Field(default="100Gi", description="size of the claim that is made")
    storage_class_name: Name | None = Field(default=None, description="default: the cluster's default class")
    access_mode: Literal["ReadWriteOnce", "ReadWriteMany"] = Field(
        default="ReadWriteMany", description="several replicas need ReadWriteMany"
    )


_PATH_NAME = "[A-Za-z0-9_][A-Za-z0-9_.-]*"
_OWN_CLAIM = "has(self.storage.claimName) || has(oldSelf.storage.claimName)"


class HuggingFaceSource(Model):
    """A repository of a model hub, downloaded once by a loader Job."""

    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            f"{_OWN_CLAIM} || (self.storage.accessMode == oldSelf.storage.accessMode"
            " && has(self.storage.storageClassName) == has(oldSelf.storage.storageClassName)"
            " && (!has(self.storage.storageClassName)"
            " || self.storage.storageClassName == oldSelf.storage.storageClassName))",
            "storageClassName and accessMode of a claim that was made are immutable; set claimName for another",
        ),
        (
            f"{_OWN_CLAIM} || quantity(self.storage.size).compareTo(quantity(oldSelf.storage.size)) >= 0",
            "the size of a claim that was made can only grow; set claimName for another",
        ),
    )
    repository: Annotated[str, Field(min_length=3, max_length=256, pattern=rf"^{_PATH_NAME}/{_PATH_NAME}$")] = Field(
        description="owner/name, for example Qwen/Qwen3-VL-8B-Instruct"
    )
    revision: Annotated[str, Field(min_length=1, max_length=128, pattern=rf"^{_PATH_NAME}(/{_PATH_NAME})*$")] = Field(
        default="main", description="branch, tag or commit; a commit always means the same files"
    )
    token_secret: SecretKey | None = Field(
        default=None, description="token for a gated repository; the loader alone sees it"
    )
    endpoint: Annotated[str, Field(max_length=512, pattern=r"^https?://[!-~]+$")] = Field(
        default="https://huggingface.co", description="the hub, or a mirror of it"
    )
    storage: StorageSpec = StorageSpec()


class ModelSource(Model):
    """Exactly one is set."""

    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "[has(self.demo), has(self.pvc), has(self.hostPath), has(self.image), has(self.huggingFace)]"
            ".filter(x, x).size() == 1",
            "exactly one of demo, pvc, hostPath, image and huggingFace must be set",
        ),
    )
    demo: DemoSource | None = None
    pvc: PVCSource | None = None
    host_path: HostPathSource | None = None
    image: ImageSource | None = None
    hugging_face: HuggingFaceSource | None = None

    @model_validator(mode="after")
    def _exactly_one(self) -> ModelSource:
        set_ones = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(set_ones) != 1:
            raise ValueError("exactly one of demo, pvc, hostPath, image and huggingFace must be set")
        return self
