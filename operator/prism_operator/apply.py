"""Children into the cluster: applied, left alone where they are somebody else's, pruned where nothing wants them."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from prism_operator.api import (
    CHILD_KINDS,
    Api,
    ApiError,
    Conflict,
    Forbidden,
    Invalid,
    Kind,
    NotFound,
    Object,
    kinds_by_name,
)
from prism_operator.children import CREATE_ONLY_KINDS
from prism_operator.deployment import LABEL_CLASS, MANAGED_BY
from prism_operator.drift import needs_apply, stamped
from prism_operator.snapshot import Problem

log = logging.getLogger(__name__)

ChildKey = tuple[str, str]
"""(kind, name)."""

_MANAGER = re.compile(r'conflict with "([^"]+)"')

REFERENCED_KINDS = frozenset({"ConfigMap", "PersistentVolumeClaim"})
"""What pods of an old revision may still need: it stays while a pod or a revision names it."""


def owner_uid(body: Mapping[str, Any]) -> str:
    """Of the controller; empty for an orphan."""
    owners = body["metadata"].get("ownerReferences") or ()
    return next((owner["uid"] for owner in owners if owner.get("controller")), "")


def read_children(api: Api, namespace: str, labels: str, uid: str, missing: frozenset[str]) -> dict[ChildKey, Object]:
    """The children of the PrismDeployment `uid`, but for Secrets, which are never read. `missing`: kinds not served."""
    found: dict[ChildKey, Object] = {}
    for kind in CHILD_KINDS:
        if kind.kind in missing:
            continue
        try:
            bodies = api.list(kind, namespace, labels)
        except NotFound:
            if not kind.is_optional:
                raise
            continue  # its API has just gone
        found |= {(kind.kind, body["metadata"]["name"]): body for body in bodies if owner_uid(body) == uid}
    return found


def apply_children(
    api: Api, wanted: Sequence[Object], live: dict[ChildKey, Object], uid: str, operator_class: str
) -> list[Problem]:
    """In order, and only what differs; `live` follows. A child that cannot be applied is a problem; others go on."""
    problems = []
    kinds = kinds_by_name()
    for child in wanted:
        kind = kinds[child["apiVersion"], child["kind"]]
        metadata = child["metadata"]
        key = (kind.kind, metadata["name"])
        try:
            live[key] = _apply_one(api, kind, stamped(child), live.get(key), uid, operator_class)
        except _NotOurs as stranger:
            problems.append(Problem(True, f"{kind.kind} {metadata['name']}", str(stranger)))
        except (Invalid, Forbidden) as refusal:
            problems.append(Problem(False, f"{kind.kind} {metadata['name']}", refusal.message))
    return problems


class _NotOurs(Exception):
    """The object, or one of its fields, belongs to somebody else."""


def _apply_one(api: Api, kind: Kind, child: Object, live: Object | None, uid: str, operator_class: str) -> Object:
    namespace, name = child["metadata"]["namespace"], child["metadata"]["name"]
    if live is None:  # not among ours: absent, or a stranger of that name
        try:
            live = api.get(kind, namespace, name)
        except NotFound:
            live = None
    if live is not None:
        _check_ours(live, uid, operator_class)
        if live["metadata"].get("deletionTimestamp"):
            return live  # its deletion is an event, after which it is made again
        if kind.kind in CREATE_ONLY_KINDS or not needs_apply(child, live):
            return live
    log.info("applying %s %s/%s", kind.kind, namespace, name)
    try:
        return api.apply(kind, namespace, child)
    except Conflict as conflict:
        if not _is_settled_by_force(conflict):
            raise _NotOurs(conflict.message) from None
        return api.apply(kind, namespace, child, force=True)


def _check_ours(live: Object, uid: str, operator_class: str) -> None:
    labels = live["metadata"].get("labels") or {}
    if owner_uid(live) != uid:
        owners = live["metadata"].get("ownerReferences") or ()
        whose = ", ".join(f"{owner['kind']} {owner['name']}" for owner in owners) or "nobody that is known"
        raise _NotOurs(f"it exists already and belongs to {whose}")
    if labels.get("app.kubernetes.io/managed-by") != MANAGED_BY or labels.get(LABEL_CLASS) != operator_class:
        raise _NotOurs(f"it is managed by an operator of class {labels.get(LABEL_CLASS, 'unknown')}")


def _is_settled_by_force(conflict: Conflict) -> bool:
    """Fields that a person or this operator has set by other means are taken back: the PrismDeployment is where they
    are edited. Another controller's are not, since the two would fight for ever."""
    managers = [match[1] for cause in conflict.causes if (match := _MANAGER.search(cause))]
    return bool(managers) and all(name == MANAGED_BY or name.startswith("kubectl") for name in managers)


def prune(
    api: Api, wanted: Iterable[Object], live: Mapping[ChildKey, Object], in_use: Sequence[Mapping[str, Any]]
) -> None:
    """Deletes children that left the spec. `in_use`: pod specs of running pods and of revisions that may come back."""
    kept = {(child["kind"], child["metadata"]["name"]) for child in wanted}
    texts = [json.dumps(spec.get("volumes") or ()) for spec in in_use]
    kinds = kinds_by_name()
    for (kind_name, name), body in live.items():
        if (kind_name, name) in kept or body["metadata"].get("deletionTimestamp"):
            continue
        if kind_name in REFERENCED_KINDS and any(json.dumps(name) in text for text in texts):
            continue
        namespace = body["metadata"]["namespace"]
        log.info("deleting %s %s/%s, which left the spec", kind_name, namespace, name)
        try:
            api.delete(kinds[body["apiVersion"], kind_name], namespace, name, body["metadata"]["uid"])
        except ApiError as error:
            log.warning("cannot delete %s %s/%s: %s", kind_name, namespace, name, error)
