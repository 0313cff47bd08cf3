"""What is passed through to pods."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from prism_operator.crd.base import Annotations, Labels, Model, Name, Open, OptionalName


class RouterPodTemplateSpec(Model):
    """What is passed through to the router pods."""

    resources: Open = Field(default_factory=dict, description="of the container; cards are added to an engine's")
    node_selector: Labels = Field(default_factory=dict, description="labels of nodes that may run such a pod")
    tolerations: Annotated[list[Open], Field(max_length=32)] = Field(
        default_factory=list, description="taints that these pods tolerate"
    )
    affinity: Open = Field(default_factory=dict, description="a Kubernetes Affinity")
    labels: Labels = Field(default_factory=dict, description="further labels of these pods")
    annotations: Annotations = Field(default_factory=dict, description="further annotations of these pods")
    priority_class_name: OptionalName = Field(default="", description="a PriorityClass")
    image_pull_secrets: Annotated[list[Name], Field(max_length=16)] = Field(
        default_factory=list,
        description="Secrets with registry credentials, by name; routers without any use the engines'",
    )


class PodTemplateSpec(RouterPodTemplateSpec):
    """What is passed through to the engine pods."""

    runtime_class_name: OptionalName = Field(default="", description="a RuntimeClass, for example nvidia")
    read_only_root_filesystem: bool | None = Field(
        default=None, description="default: true on CPU, false with a card, whose runtime hooks write into it"
    )
