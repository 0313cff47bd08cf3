"""An operator upgrade alone changes no pod template: which version and default image a workload goes on with."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prism_operator.children.names import content_hash
from prism_operator.deployment import ANNOTATION_TEMPLATE_VERSION, TEMPLATE_VERSIONS, Deployment
from prism_operator.options import OperatorOptions
from prism_operator.refused import Refused

ANNOTATION_TEMPLATE_INPUTS = "prism-infer.io/template-inputs"
"""On the StatefulSet: a hash of what its pod template was rendered from. While the spec's is the same, so is the
rendering."""
ANNOTATION_DEFAULT_IMAGE = "prism-infer.io/default-image"
"""On the StatefulSet: the image that stands in for an empty `spec.image.reference`."""

_BESIDE_THE_TEMPLATE: dict[str, Any] = {
    **dict.fromkeys(("operator_class", "replicas", "autoscaling", "service", "network_policy", "monitoring"), True),
    "startup": {"stall_seconds"},
}


def template_inputs(deployment: Deployment) -> str:
    """A hash of the parts of the spec that reach the pod template. Fields at their default do not count: a field that a
    newer operator knows is no change."""
    said = deployment.spec.model_dump(mode="json", exclude_defaults=True, exclude=_BESIDE_THE_TEMPLATE)
    said = {group: fields for group, fields in said.items() if fields != {}}
    return content_hash(json.dumps(said, sort_keys=True))[:16]


def default_image(deployment: Deployment, options: OperatorOptions) -> str:
    return options.cpu_image if deployment.spec.engine.device == "cpu" else options.engine_image


def check_version(template_version: int) -> None:
    if template_version not in TEMPLATE_VERSIONS:
        known = ", ".join(map(str, TEMPLATE_VERSIONS))
        raise Refused("UnknownTemplateVersion", f"templateVersion {template_version}: this operator renders {known}")


def rendering_annotations(deployment: Deployment, options: OperatorOptions, template_version: int) -> dict[str, str]:
    return {
        ANNOTATION_TEMPLATE_VERSION: str(template_version),
        ANNOTATION_TEMPLATE_INPUTS: template_inputs(deployment),
        ANNOTATION_DEFAULT_IMAGE: default_image(deployment, options),
    }


def pinned(
    deployment: Deployment, options: OperatorOptions, live: Mapping[str, Any] | None
) -> tuple[OperatorOptions, int]:
    """Options and template version to render with. `live` is the StatefulSet as the API server has it, if it has.

    A workload whose template's inputs have not changed keeps the version and the default image that it was made with;
    a new or changed one gets the newest, or `spec.templateVersion`. Raises Refused (`UnknownTemplateVersion`).
    """
    annotations = {} if live is None else live["metadata"].get("annotations") or {}
    newest = deployment.spec.template_version or TEMPLATE_VERSIONS[-1]
    if annotations.get(ANNOTATION_TEMPLATE_INPUTS) != template_inputs(deployment):
        check_version(newest)
        return options, newest
    kept = int(annotations[ANNOTATION_TEMPLATE_VERSION])
    image = annotations[ANNOTATION_DEFAULT_IMAGE]
    version = kept if kept in TEMPLATE_VERSIONS else newest
    check_version(version)
    which = "cpu_image" if deployment.spec.engine.device == "cpu" else "engine_image"
    return replace(options, **{which: image}), version
