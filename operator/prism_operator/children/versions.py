"""An operator upgrade alone changes no pod template: which version and default image a workload goes on with."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from prism_operator.children.names import content_hash
from prism_operator.deployment import (
    ANNOTATION_TEMPLATE_VERSION,
    ROUTER_TEMPLATE_VERSIONS,
    TEMPLATE_VERSIONS,
    Deployment,
)
from prism_operator.options import OperatorOptions
from prism_operator.refused import Refused

ANNOTATION_TEMPLATE_INPUTS = "prism-infer.io/template-inputs"
"""On the workload: a hash of what its pod template was rendered from. While the spec's is the same, so is the
rendering."""
ANNOTATION_DEFAULT_IMAGE = "prism-infer.io/default-image"
"""On the workload: the image that stands in for an empty reference of the spec."""

_BESIDE_THE_ENGINES: dict[str, Any] = {
    **dict.fromkeys(("operator_class", "replicas", "autoscaling", "router"), True),
    **dict.fromkeys(("service", "gateway", "network_policy", "monitoring"), True),
    "startup": {"stall_seconds"},
}
_OF_THE_ROUTERS: dict[str, Any] = {
    "router": {"image", "overrides", "pod_template"},
    "image": {"version"},
    "engine": {"request_timeout_seconds", "overrides"},
    "media": {"max_item_size"},
    "drain": True,
    "pod_template": {"image_pull_secrets"},
}
"""What `children/router.py` reads. The engines' version counts, so that saying it moves both to their newest images."""


def _hash_of(said: Mapping[str, Any]) -> str:
    """Fields at their default do not count: a field that a newer operator knows is no change."""
    said = {group: fields for group, fields in said.items() if fields != {}}
    return content_hash(json.dumps(said, sort_keys=True))[:16]


def _engine_inputs(deployment: Deployment) -> str:
    return _hash_of(deployment.spec.model_dump(mode="json", exclude_defaults=True, exclude=_BESIDE_THE_ENGINES))


def _router_inputs(deployment: Deployment) -> str:
    return _hash_of(deployment.spec.model_dump(mode="json", exclude_defaults=True, include=_OF_THE_ROUTERS))


def _engine_image_option(deployment: Deployment) -> str:
    return "cpu_image" if deployment.spec.engine.device == "cpu" else "engine_image"


@dataclass(frozen=True, slots=True)
class Workload:
    """One kind of pods, and what their template is rendered from."""

    versions: tuple[int, ...]
    """Template versions that this operator can render, oldest first."""
    inputs: Callable[[Deployment], str]
    """A hash of the parts of the spec that reach the pod template."""
    image_option: Callable[[Deployment], str]
    """Which of the operator's options is the default image."""
    asked_version: Callable[[Deployment], int]
    """What the spec says; 0: the newest."""

    def check_version(self, template_version: int) -> None:
        if template_version not in self.versions:
            known = ", ".join(map(str, self.versions))
            raise Refused(
                "UnknownTemplateVersion", f"templateVersion {template_version}: this operator renders {known}"
            )

    def default_image(self, deployment: Deployment, options: OperatorOptions) -> str:
        image: str = getattr(options, self.image_option(deployment))
        return image

    def annotations(self, deployment: Deployment, options: OperatorOptions, template_version: int) -> dict[str, str]:
        """Of the workload's object: what `pinned` goes by the next time."""
        return {
            ANNOTATION_TEMPLATE_VERSION: str(template_version),
            ANNOTATION_TEMPLATE_INPUTS: self.inputs(deployment),
            ANNOTATION_DEFAULT_IMAGE: self.default_image(deployment, options),
        }

    def pinned(
        self, deployment: Deployment, options: OperatorOptions, live: Mapping[str, Any] | None
    ) -> tuple[OperatorOptions, int]:
        """Options and template version to render with. `live` is the object as the API server has it, if it has.

        A workload whose template's inputs have not changed keeps the version and the default image that it was made
        with; a new or changed one gets the newest, or what the spec asks for. Raises Refused
        (`UnknownTemplateVersion`).
        """
        annotations = {} if live is None else live["metadata"].get("annotations") or {}
        newest = self.asked_version(deployment) or self.versions[-1]
        if annotations.get(ANNOTATION_TEMPLATE_INPUTS) != self.inputs(deployment):
            self.check_version(newest)
            return options, newest
        kept = annotations.get(ANNOTATION_TEMPLATE_VERSION)
        version = next((known for known in self.versions if str(known) == kept), newest)
        self.check_version(version)
        image: Any = annotations.get(ANNOTATION_DEFAULT_IMAGE) or self.default_image(deployment, options)
        return replace(options, **{self.image_option(deployment): image}), version


ENGINE = Workload(
    TEMPLATE_VERSIONS, _engine_inputs, _engine_image_option, lambda deployment: deployment.spec.template_version
)
ROUTER = Workload(ROUTER_TEMPLATE_VERSIONS, _router_inputs, lambda deployment: "router_image", lambda deployment: 0)
