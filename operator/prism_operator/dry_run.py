"""Changed workloads are shown to the API server first: one that it refuses must not change anything else."""

from __future__ import annotations

from collections.abc import Mapping

from prism_operator.api import DEPLOYMENT, STATEFUL_SET, Api, Forbidden, Invalid, Kind, NotFound, Object
from prism_operator.apply import ChildKey
from prism_operator.drift import needs_apply, stamped
from prism_operator.intent import Intent
from prism_operator.refused import Refused

WORKLOADS = {kind.kind: kind for kind in (STATEFUL_SET, DEPLOYMENT)}


def checked(api: Api, intent: Intent, live: Mapping[ChildKey, Object]) -> Intent:
    """The intent, or a frozen one with the API server's words."""
    for child in intent.children or ():
        kind = WORKLOADS.get(child["kind"])
        refused = None if kind is None else _refusal(api, kind, child, live)
        if refused is not None:
            return intent.frozen(refused)
    return intent


def pod_spec(child: Object) -> Object:
    """Of the pods that an object makes; empty if it makes none."""
    spec: Object = child.get("spec", {}).get("template", {}).get("spec", {})
    return spec


def _refusal(api: Api, kind: Kind, workload: Object, live: Mapping[ChildKey, Object]) -> Refused | None:
    wanted, metadata = stamped(workload), workload["metadata"]
    there = live.get((kind.kind, metadata["name"]))
    if not needs_apply(wanted, there) or (there is None and _exists(api, kind, metadata)):
        return None
    try:
        answer = api.apply(kind, metadata["namespace"], wanted, force=True, dry_run=True)
    except (Invalid, Forbidden) as refusal:
        return Refused("WorkloadRefused", f"{kind.kind} {metadata['name']}: {refusal.message}")
    if _has_image_volume(workload) and not _has_image_volume(answer):
        why = "model.source.image: the API server drops image volumes; it is older than 1.35 or has them off"
        return Refused("ImageVolumeUnsupported", why)
    return None


def _exists(api: Api, kind: Kind, metadata: Object) -> bool:
    """Somebody else's: `apply_children` tells of the conflict."""
    try:
        api.get(kind, metadata["namespace"], metadata["name"])
    except NotFound:
        return False
    return True


def _has_image_volume(workload: Object) -> bool:
    return any("image" in volume for volume in pod_spec(workload).get("volumes") or ())
