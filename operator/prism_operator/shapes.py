"""Which model shape a spec names, as far as the operator can tell without reading the files."""

from __future__ import annotations

import re

from prism_operator.crd.spec import PrismDeploymentSpec
from prism_server.capacity.models import KNOWN_MODELS, ModelShape

_RELEASED = re.compile(r"qwen3-vl-(2b|4b|8b|32b)(?![0-9a-z])", re.IGNORECASE)


def shape_of(spec: PrismDeploymentSpec) -> ModelShape | None:
    """`model.shape` first, else the demo, else the first name (repository, served name, path, image) that says it."""
    model, source = spec.model, spec.model.source
    if model.shape:
        return KNOWN_MODELS[model.shape]
    if source.demo is not None:
        return KNOWN_MODELS["demo"]
    said = [source.hugging_face.repository] if source.hugging_face else []
    said.append(model.served_name)
    said += [source.image.reference, source.image.path] if source.image else []
    said += [source.pvc.path, source.pvc.claim_name] if source.pvc else []
    said += [source.host_path.path] if source.host_path else []
    found = next(filter(None, map(_RELEASED.search, said)), None)
    return KNOWN_MODELS[found[1].lower()] if found else None
