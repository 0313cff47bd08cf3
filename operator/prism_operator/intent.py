"""What is to be applied for one PrismDeployment, or why nothing may change. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pydantic import ValidationError

from prism_operator.apply import ChildKey
from prism_operator.children import children, versions
from prism_operator.deployment import Deployment
from prism_operator.model_files import claims_of, is_complete
from prism_operator.nodes import NodeFacts
from prism_operator.observe import ANNOTATION_GENERATION
from prism_operator.options import OperatorOptions
from prism_operator.plan import KVPlan, plan_kv
from prism_operator.refused import Refused


@dataclass(frozen=True, slots=True)
class Intent:
    """`children` is None when what serves is to be kept as it is: no apply, no prune. `freeze` says why."""

    deployment: Deployment | None = None
    plan: KVPlan | None = None
    children: Sequence[dict[str, Any]] | None = None
    freeze: Refused | None = None
    awaits_download: bool = False
    """The workload among `children` is the one that is there, or there is none."""

    def frozen(self, why: Refused) -> Intent:
        return replace(self, children=None, freeze=why)


def intend(
    body: Mapping[str, Any],
    options: OperatorOptions,
    stateful_set: Mapping[str, Any] | None,
    nodes: Sequence[NodeFacts] | None,
    apis: frozenset[str],
    router_deployment: Mapping[str, Any] | None = None,
) -> Intent:
    """`body` is the PrismDeployment, `stateful_set` and `router_deployment` its workloads as they are, `nodes` None
    where they may not be read."""
    intent = Intent()
    try:
        deployment = Deployment.from_object(body)
        intent = replace(intent, deployment=deployment)
        plan = plan_kv(deployment.spec, nodes)
        intent = replace(intent, plan=plan)
        _check_workload(deployment, plan, stateful_set)
        pinned, version = versions.ENGINE.pinned(deployment, options, stateful_set)
        pinned, router_version = versions.ROUTER.pinned(deployment, pinned, router_deployment)
        wanted = children(deployment, pinned, version, apis, router_version)
    except ValidationError as invalid:
        return intent.frozen(Refused("SpecUnreadable", _problems(invalid)))
    except Refused as refused:
        return intent.frozen(refused)
    return replace(intent, children=[_with_generation(child, deployment.generation) for child in wanted])


def keep_download(intent: Intent, live: Mapping[ChildKey, Mapping[str, Any]]) -> Intent:
    """A model that is downloaded stays so, whatever the spec says now of tokens or of nodes: its Job stands for the one
    that would come to the same files. Beside an engine that has a claim for one node a loader might never start."""
    job = _child(intent, "Job")
    jobs = [body for (kind, _), body in live.items() if kind == "Job"]
    whole = next((body for body in jobs if job is not None and is_complete(body) and _files(body) == _files(job)), None)
    if whole is None or intent.children is None:
        return intent
    kept = [_named(child, whole["metadata"]["name"]) if child is job else child for child in intent.children]
    return replace(intent, children=kept)


def _files(job: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """What a loader's Job downloads, and the claims that it downloads into."""
    return job["spec"]["template"]["spec"]["containers"][0].get("args", []), claims_of(job)


def _named(child: dict[str, Any], name: str) -> dict[str, Any]:
    return {**child, "metadata": {**child["metadata"], "name": name}}


def hold_back(intent: Intent, live: Mapping[ChildKey, Mapping[str, Any]]) -> Intent:
    """Until the loader's Job has ended well no workload is made, and one that is there keeps its template: its pods
    serve on, and none meets half a model. Replicas follow the spec all the same."""
    job, workload = (_child(intent, kind) for kind in ("Job", "StatefulSet"))
    if job is None or workload is None or is_complete(live.get(("Job", job["metadata"]["name"]))):
        return intent
    there = live.get(("StatefulSet", workload["metadata"]["name"]))
    if there is not None and _inputs(there) == _inputs(workload):
        return intent
    kept = [] if there is None else [_scaled(there, workload)]
    children = [each for child in intent.children or () for each in (kept if child is workload else [child])]
    return replace(intent, children=children, awaits_download=True)


def _child(intent: Intent, kind: str) -> dict[str, Any] | None:
    return next((child for child in intent.children or () if child["kind"] == kind), None)


def _inputs(stateful_set: Mapping[str, Any] | None) -> str | None:
    annotations = (stateful_set or {}).get("metadata", {}).get("annotations") or {}
    found: str | None = annotations.get(versions.ANNOTATION_TEMPLATE_INPUTS)
    return found


def _scaled(there: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The workload as it is, but for its replicas."""
    annotations = there["metadata"].get("annotations") or {}
    ours = {key: annotations[key] for key in wanted["metadata"]["annotations"] if key in annotations}
    spec = {**there["spec"], "replicas": wanted["spec"]["replicas"]}
    return {**wanted, "metadata": {**wanted["metadata"], "annotations": ours}, "spec": spec}


def _check_workload(deployment: Deployment, plan: KVPlan, stateful_set: Mapping[str, Any] | None) -> None:
    """Facts decide whether a workload may be made or changed. One that stays as it is stays, whatever they say now."""
    if deployment.spec.engine.tensor_parallel > 1:
        said = "engine.tensorParallel is 2, and this version runs each engine on one card only: set it to 1"
        raise Refused("TensorParallelUnavailable", said)
    is_unchanged = _inputs(stateful_set) == versions.ENGINE.inputs(deployment)
    if not plan.feasible and not is_unchanged:
        raise Refused(plan.reason, plan.message)


def _with_generation(child: dict[str, Any], generation: int) -> dict[str, Any]:
    if child["kind"] != "StatefulSet":
        return child
    annotations = {**child["metadata"].get("annotations", {}), ANNOTATION_GENERATION: str(generation)}
    return {**child, "metadata": {**child["metadata"], "annotations": annotations}}


def _problems(invalid: ValidationError) -> str:
    return "; ".join(f"spec.{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in invalid.errors())
