"""The status of a PrismDeployment: made from a snapshot and the status before, written when it says something new."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime

from prism_operator.conditions import LONGEST_MESSAGE_CHARS, Verdict, verdicts
from prism_operator.crd.status import Condition, PlannedRange, PrismDeploymentStatus
from prism_operator.plan import KVPlan
from prism_operator.snapshot import Snapshot

MEASURED_FIELDS = ("measured_pages", "measured_tokens")
_REASON = re.compile(r"^[^A-Za-z]+|[^A-Za-z0-9_]+")
LONGEST_MODEL_CHARS = 253


def next_status(snapshot: Snapshot, before: PrismDeploymentStatus, now: datetime) -> PrismDeploymentStatus:
    """`before` is what the API server holds. What nobody can measure now keeps its last number."""
    serving, plan = snapshot.serving, snapshot.plan
    least = min(snapshot.capacities, key=lambda capacity: capacity.total_pages, default=None)
    revision = serving.desired_revision if serving else None
    updated = sum(pod.revision == revision and not pod.is_terminating for pod in snapshot.pods)
    return PrismDeploymentStatus(
        observed_generation=snapshot.generation,
        serving_generation=serving.generation if serving else None,
        template_version=serving.template_version if serving else None,
        model=(snapshot.facts.get("model", before.model) or "")[:LONGEST_MODEL_CHARS] or None,
        replicas=sum(not pod.is_terminating for pod in snapshot.pods),
        ready_replicas=len(snapshot.ready_pods),
        updated_replicas=updated,
        ready_routers=len(snapshot.routers.ready),
        selector=snapshot.facts.get("selector", before.selector),
        planned_pages=plan.pages if plan is not None else None,
        planned_tokens=plan.tokens if plan is not None else None,
        planned_range=_range(plan),
        measured_pages=least.total_pages if least is not None else before.measured_pages,
        measured_tokens=least.total_tokens if least is not None else before.measured_tokens,
        url=snapshot.facts.get("url", before.url),
        conditions=merge(before.conditions, verdicts(snapshot), snapshot.generation, now),
    )


def _range(plan: KVPlan | None) -> PlannedRange | None:
    """Only where the eligible cards differ."""
    if plan is None or plan.pages is None or plan.max_pages is None or plan.max_pages == plan.pages:
        return None
    return PlannedRange(min_pages=plan.pages, max_pages=plan.max_pages)


def merge(before: Sequence[Condition], said: Sequence[Verdict], generation: int, now: datetime) -> list[Condition]:
    """Conditions with their times: `lastTransitionTime` moves only when the status flips."""
    known = {condition.type: condition for condition in before}
    merged = []
    for verdict in said:
        old = known.get(verdict.type)
        is_flip = old is None or old.status != verdict.status
        merged.append(
            Condition(
                type=verdict.type,
                status=verdict.status,
                observed_generation=generation,
                last_transition_time=timestamp(now) if is_flip or old is None else old.last_transition_time,
                reason=_REASON.sub("", verdict.reason) or "Unknown",
                message=verdict.message[:LONGEST_MESSAGE_CHARS],
            )
        )
    return merged


def transitions(before: Sequence[Condition], after: Sequence[Condition]) -> list[Condition]:
    """Conditions that have flipped, or whose reason is another: worth an Event. The first word on each is not."""
    known = {condition.type: condition for condition in before}
    return [
        condition
        for condition in after
        if (old := known.get(condition.type)) is not None
        and (old.status, old.reason) != (condition.status, condition.reason)
    ]


def is_due(
    before: PrismDeploymentStatus, after: PrismDeploymentStatus, since_write_s: float, min_interval_s: float
) -> bool:
    """Whether to write: at once for news, after the interval when only measured pages differ."""
    if before == after:
        return False
    return _without_measures(before) != _without_measures(after) or since_write_s >= min_interval_s


def _without_measures(status: PrismDeploymentStatus) -> PrismDeploymentStatus:
    """Without the numbers that engines report, and the sentence that repeats them."""
    conditions = [
        condition.model_copy(update={"message": ""}) if condition.type == "KVPlanMatched" else condition
        for condition in status.conditions
    ]
    return status.model_copy(update={"conditions": conditions, **dict.fromkeys(MEASURED_FIELDS)})


def timestamp(now: datetime) -> str:
    """RFC 3339 in UTC, whole seconds, as metav1.Time."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
