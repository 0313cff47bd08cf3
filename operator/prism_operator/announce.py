"""Events of a PrismDeployment: what `kubectl describe` shows when a condition changes."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime

from prism_operator.api import EVENT, Api, ApiError, Object
from prism_operator.crd.status import Condition
from prism_operator.deployment import MANAGED_BY
from prism_operator.options import OperatorOptions
from prism_operator.rollout import Phase
from prism_operator.status import timestamp

LONGEST_NOTE_CHARS = 1000
BAD_WHEN_TRUE = frozenset({"Stalled", "ChildConflict", "TensorParallelUnavailable", "SettingsUnchecked"})
PASSING_REASONS = {phase.value for phase in Phase} | {
    "NotApplied",
    "NoRouters",
    "RoutersStarting",
    "NoPods",
    "ScaledToZero",
    "Downloading",
    "AwaitingModel",
}
"""Stages of an orderly start or rollout: bad for a while, and no reason to warn."""

log = logging.getLogger(__name__)


def transitions(api: Api, body: Object, changed: Sequence[Condition], options: OperatorOptions) -> None:
    """One Event for each condition that has changed. An Event that cannot be posted is a line in the log."""
    for condition in changed:
        try:
            api.create(EVENT, body["metadata"]["namespace"], event(body, condition, options))
        except ApiError as error:
            log.warning("cannot post an Event: %s", error)


def event(body: Object, condition: Condition, options: OperatorOptions) -> Object:
    metadata, now = body["metadata"], timestamp(datetime.now(UTC))
    is_bad = condition.status == ("True" if condition.type in BAD_WHEN_TRUE else "False")
    is_warning = is_bad and condition.reason not in PASSING_REASONS
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{metadata['name'][:200]}.{uuid.uuid4().hex[:16]}", "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": body["apiVersion"],
            "kind": body["kind"],
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "uid": metadata["uid"],
        },
        "type": "Warning" if is_warning else "Normal",
        "reason": condition.reason[:128],
        "message": f"{condition.type}={condition.status}: {condition.message}"[:LONGEST_NOTE_CHARS],
        "source": {"component": MANAGED_BY},
        "reportingComponent": MANAGED_BY,
        "reportingInstance": options.operator_name,
        "firstTimestamp": now,
        "lastTimestamp": now,
        "count": 1,
    }
