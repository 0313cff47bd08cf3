"""What each condition says of a snapshot. Pure; every function answers for one aspect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from prism_operator.children import autoscale, gateway
from prism_operator.crd.status import ConditionStatus, ConditionType
from prism_operator.model_files import model_files
from prism_operator.pods import condition
from prism_operator.rollout import Phase, floor_of
from prism_operator.snapshot import Snapshot

LONGEST_MESSAGE_CHARS = 4096
PLAN_TOLERANCE = 0.1
"""A plan is an estimate of a card's working memory: measured pages within this part of it match."""

KEYS_SETTING = "http.api_keys_file"
"""What an engine names in its last line when it cannot start with its API keys."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """A condition without its times."""

    type: ConditionType
    status: ConditionStatus
    reason: str
    message: str = ""


def verdicts(snapshot: Snapshot) -> list[Verdict]:
    """All conditions that apply, in the order that a person reads them."""
    found = (judge(snapshot) for judge in _JUDGES)
    return [verdict for verdict in found if verdict is not None]


def available(snapshot: Snapshot) -> Verdict:
    """Whether users are served: at least the floor of pods, of any revision, is ready and has requests by a router."""
    replicas = snapshot.serving.replicas if snapshot.serving else 0
    ready, routers = snapshot.ready_pods, snapshot.routers
    reached = sum(routers.reach(pod) for pod in ready)
    if snapshot.serving is None:
        return Verdict("Available", "False", "NoPods", "there are no engines yet")
    if replicas == 0 and not ready:
        return Verdict("Available", "False", "ScaledToZero", "spec.replicas is 0")
    if not ready:
        return Verdict("Available", "False", "NoReadyPods", f"0 of {replicas} pods serve")
    if not routers.ready and not routers.is_bypassed:
        said = f"{len(ready)} of {replicas} pods are ready, and no router is: see RouterReady"
        return Verdict("Available", "False", "NoReadyRouters", said)
    count = f"{reached} of {replicas} pods serve, through {len(routers.ready)} of {routers.replicas} routers"
    if reached < max(floor_of(replicas), 1):
        return Verdict("Available", "False", "BelowFloor", f"{count}; at least {max(floor_of(replicas), 1)} should")
    return Verdict("Available", "True", "Serving", count)


def ready(snapshot: Snapshot) -> Verdict:
    """Whether this very generation is what serves, with every pod."""
    serving = snapshot.serving
    if snapshot.freeze is not None:
        before = f"; generation {serving.generation} serves on" if serving else ""
        return Verdict("Ready", "False", snapshot.freeze.reason, snapshot.freeze.message + before)
    if snapshot.problems:
        conflicts = [problem for problem in snapshot.problems if problem.is_conflict]
        first = (conflicts or snapshot.problems)[0]
        reason = "ChildConflict" if conflicts else "ChildRefused"
        return Verdict("Ready", "False", reason, f"{first.child}: {first.message}")
    if snapshot.awaits_download:
        before = f"; generation {serving.generation} serves on" if serving else ""
        return Verdict("Ready", "False", "AwaitingModel", f"the download comes first, see ModelReady{before}")
    if serving is None or serving.generation < snapshot.generation:
        return Verdict("Ready", "False", "NotApplied", "the workload has not been brought to this generation yet")
    if snapshot.moves.phase is not Phase.DONE:
        return Verdict("Ready", "False", snapshot.moves.phase.value, snapshot.moves.message)
    if not snapshot.routers.is_rolled_out:
        return Verdict("Ready", "False", "RoutersStarting", f"{_router_count(snapshot)}; they are being replaced")
    return Verdict("Ready", "True", "RolledOut", f"generation {serving.generation}: {snapshot.moves.message}")


def progressing(snapshot: Snapshot) -> Verdict:
    """Whether something still moves towards the wanted state; with one replica it warns of the gap first."""
    moves = snapshot.moves
    if snapshot.serving is None:
        reason = "AwaitingModel" if snapshot.awaits_download else "NotApplied"
        reason = snapshot.freeze.reason if snapshot.freeze else reason
        return Verdict("Progressing", "False", reason, "there is no workload to roll out")
    if moves.phase is Phase.DONE and not snapshot.routers.is_rolled_out:
        return Verdict("Progressing", "True", "RoutersStarting", f"{_router_count(snapshot)}; they are being replaced")
    is_moving = moves.phase is not Phase.DONE
    return Verdict("Progressing", "True" if is_moving else "False", moves.phase.value, moves.message)


def stalled(snapshot: Snapshot) -> Verdict:
    """The first pod that cannot come up, in its own words; engines before routers. Then pods that cannot be made."""
    engines = sorted(snapshot.pods, key=lambda pod: pod.ordinal)
    for pod in (*engines, *sorted(snapshot.routers.pods, key=lambda pod: pod.name)):
        if pod.trouble is not None and not pod.is_ready and not pod.is_terminating:
            return Verdict("Stalled", "True", pod.trouble.reason, f"{pod.name}: {pod.trouble.message}")
    for who, refusal in (("engines", snapshot.refusal), ("routers", snapshot.routers.refusal)):
        if refusal is not None:
            return Verdict("Stalled", "True", refusal.reason, f"{who}: {refusal.message}")
    return Verdict("Stalled", "False", "NoPodStalled", "no pod is held up")


def router_ready(snapshot: Snapshot) -> Verdict:
    """Whether requests find routers. What they know of engines is for `Available` and the rollout."""
    routers, count = snapshot.routers, _router_count(snapshot)
    num_ready = len(routers.ready)
    if routers.replicas == 0:
        return Verdict("RouterReady", "False", "NoRouters", "there are no routers yet")
    if num_ready >= min(routers.floor, routers.replicas):
        return Verdict("RouterReady", "True", "RoutersServe", count)
    trouble = next((pod for pod in routers.pods if pod.trouble is not None and not pod.is_ready), None)
    if trouble is not None and trouble.trouble is not None:
        return Verdict("RouterReady", "False", trouble.trouble.reason, f"{trouble.name}: {trouble.trouble.message}")
    if routers.refusal is not None:
        return Verdict("RouterReady", "False", routers.refusal.reason, f"routers: {routers.refusal.message}")
    if num_ready == 0:
        return Verdict("RouterReady", "False", "NoReadyRouters", count)
    return Verdict("RouterReady", "False", "TooFewRouters", f"{count}, at least {routers.floor} should be")


def _router_count(snapshot: Snapshot) -> str:
    return f"{len(snapshot.routers.ready)} of {snapshot.routers.replicas} routers are ready"


def kv_planned(snapshot: Snapshot) -> Verdict:
    """The sum of pages on paper."""
    if snapshot.plan is None:
        return Verdict("KVPlanned", "Unknown", "NoPlan", "the spec cannot be planned for")
    return Verdict("KVPlanned", snapshot.plan.status, snapshot.plan.reason, snapshot.plan.message)


def kv_plan_matched(snapshot: Snapshot) -> Verdict:
    """Whether the cards hold what was planned."""
    if not snapshot.capacities:
        return Verdict("KVPlanMatched", "Unknown", "NotMeasured", "no ready pod has told its pages yet")
    least = min(snapshot.capacities, key=lambda capacity: capacity.total_pages)
    measured = f"measured {least.total_pages:,} pages on {least.pod}"
    if snapshot.plan is None or not snapshot.plan.pages:
        return Verdict("KVPlanMatched", "Unknown", "NotPlanned", f"{measured}; there is no plan to compare with")
    planned, most = snapshot.plan.pages, snapshot.plan.max_pages or snapshot.plan.pages
    compared = f"planned {planned:,}{f' to {most:,}' if most > planned else ''} pages, {measured}"
    if least.total_pages < planned * (1 - PLAN_TOLERANCE):
        return Verdict("KVPlanMatched", "False", "FewerPages", compared)
    if least.total_pages > most * (1 + PLAN_TOLERANCE):
        return Verdict("KVPlanMatched", "False", "MorePages", compared)
    return Verdict("KVPlanMatched", "True", "Matched", compared)


def model_ready(snapshot: Snapshot) -> Verdict:
    """Whether the checkpoint's files are where engines look for them."""
    return Verdict("ModelReady", *model_files(snapshot))


def auth_ready(snapshot: Snapshot) -> Verdict:
    """Whether the API keys that the Secret holds now are in force. The operator cannot read the Secret: pods tell."""
    secret = snapshot.spec.auth.api_keys_secret if snapshot.spec is not None else None
    if snapshot.spec is None:
        return Verdict("AuthReady", "Unknown", "SpecUnreadable", "the spec cannot be read")
    if secret is None:
        return Verdict("AuthReady", "True", "NoKeysAsked", "no API key is asked for")
    for pod in snapshot.pods:
        if pod.trouble is None or pod.is_ready:
            continue
        said = f"{pod.name}: {pod.trouble.message}"
        if KEYS_SETTING in pod.trouble.message:
            return Verdict("AuthReady", "False", "BadKeys", said)
        if f'"{secret}"' in pod.trouble.message:  # in quotes: a short name may be part of anything
            return Verdict("AuthReady", "False", "SecretNotMounted", said)
    for capacity in snapshot.capacities:
        if capacity.api_keys_problem:
            return Verdict("AuthReady", "False", "BadKeys", f"{capacity.pod}: {capacity.api_keys_problem}")
    if not snapshot.ready_pods:
        return Verdict("AuthReady", "Unknown", "NoReadyPods", f"no pod has read Secret {secret} yet")
    return Verdict("AuthReady", "True", "KeysRead", f"pods have read Secret {secret}")


def autoscaling_ready(snapshot: Snapshot) -> Verdict | None:
    """Whether the autoscaler works; absent where none is asked for."""
    if snapshot.spec is None or snapshot.spec.autoscaling is None:
        return None
    kind = "ScaledObject" if snapshot.spec.autoscaling.kind == "KEDA" else "HorizontalPodAutoscaler"
    if autoscale.KEDA_API in snapshot.missing_apis:
        return Verdict("AutoscalingReady", "False", "APIMissing", f"this cluster does not serve {autoscale.KEDA_API}")
    if snapshot.autoscaler is None:
        return Verdict("AutoscalingReady", "Unknown", "NotMade", f"the {kind} is not there yet")
    for kind_of_condition in ("AbleToScale", "ScalingActive", "Ready"):
        found = condition(snapshot.autoscaler, kind_of_condition)
        if found is not None and found["status"] == "False" and found.get("reason") != "ScalingDisabled":
            return Verdict("AutoscalingReady", "False", found.get("reason", "Broken"), found.get("message", ""))
    known = condition(snapshot.autoscaler, "ScalingActive") or condition(snapshot.autoscaler, "Ready")
    if known is None:
        return Verdict("AutoscalingReady", "Unknown", "NoNews", f"the {kind} has not been looked at yet")
    return Verdict("AutoscalingReady", "True", "Scaling", f"the {kind} works")


def inference_pool_ready(snapshot: Snapshot) -> Verdict | None:
    """Whether gateways take the pool; absent where none is asked for."""
    if snapshot.spec is None or snapshot.spec.gateway.inference_pool is None:
        return None
    if gateway.INFERENCE_API in snapshot.missing_apis:
        lacking = f"this cluster does not serve {gateway.INFERENCE_API}"
        return Verdict("InferencePoolReady", "False", "APIMissing", lacking)
    if snapshot.inference_pool is None:
        return Verdict("InferencePoolReady", "Unknown", "NotMade", "the InferencePool is not there yet")
    parents = snapshot.inference_pool.get("status", {}).get("parents") or ()
    said = [found for parent in parents for found in parent.get("conditions") or ()]
    for found in said:
        if found["status"] == "False":
            return Verdict("InferencePoolReady", "False", found.get("reason", "Broken"), found.get("message", ""))
    if not any(found["type"] == "Accepted" and found["status"] == "True" for found in said):
        return Verdict("InferencePoolReady", "Unknown", "NoNews", "no gateway has taken the InferencePool yet")
    return Verdict("InferencePoolReady", "True", "Accepted", "a gateway has taken the InferencePool")


def child_conflict(snapshot: Snapshot) -> Verdict | None:
    """Children that belong to somebody else; absent where there are none."""
    conflicts = [f"{problem.child}: {problem.message}" for problem in snapshot.problems if problem.is_conflict]
    return Verdict("ChildConflict", "True", "NotOurs", "; ".join(conflicts)) if conflicts else None


def tensor_parallel_unavailable(snapshot: Snapshot) -> Verdict | None:
    if snapshot.freeze is None or snapshot.freeze.reason != "TensorParallelUnavailable":
        return None
    return Verdict("TensorParallelUnavailable", "True", "TensorParallelUnavailable", snapshot.freeze.message)


def settings_unchecked(snapshot: Snapshot) -> Verdict | None:
    """Said where the image's version is not one whose settings this operator knows."""
    if snapshot.is_settings_checked or snapshot.spec is None:
        return None
    version = snapshot.spec.image.version
    return Verdict("SettingsUnchecked", "True", "UnknownVersion", f"the settings of version {version} are not known")


_JUDGES: tuple[Callable[[Snapshot], Verdict | None], ...] = (
    available,
    ready,
    progressing,
    stalled,
    router_ready,
    kv_planned,
    kv_plan_matched,
    model_ready,
    auth_ready,
    autoscaling_ready,
    inference_pool_ready,
    child_conflict,
    tensor_parallel_unavailable,
    settings_unchecked,
)
