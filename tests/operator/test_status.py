"""What conditions say, and when the status is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

from prism_operator.admin_client import Capacity
from prism_operator.conditions import Verdict, verdicts
from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.crd.status import PrismDeploymentStatus
from prism_operator.plan import KVPlan
from prism_operator.pods import Pod, Trouble
from prism_operator.refused import Refused
from prism_operator.rollout import next_moves
from prism_operator.routers import Routers
from prism_operator.snapshot import Problem, Serving, Snapshot, lacks_pods
from prism_operator.status import is_due, next_status, transitions

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DEMO: dict[str, Any] = {"model": {"source": {"demo": {}}}}


def pod(ordinal: int, revision: str = "r1", **fields: Any) -> Pod:
    return Pod(**{"name": f"e-{ordinal}", "uid": f"u{ordinal}", "revision": revision, "ordinal": ordinal} | fields)


def router(name: str, **fields: Any) -> Pod:
    return Pod(**{"name": name, "uid": name, "revision": "", "ordinal": -1, "is_ready": True} | fields)


ROUTERS = Routers(2, True, [router("r-a"), router("r-b")])
"""Both are ready; neither has been asked."""


def snapshot(pods: list[Pod], *, spec: Mapping[str, Any] = DEMO, replicas: int = 2, **fields: Any) -> Snapshot:
    """Of generation 3, applied, whose revision is r1."""
    moves = next_moves(pods, "r1", replicas, is_announced=False, has_slot=True)
    made = {
        "generation": 3,
        "moves": moves,
        "spec": PrismDeploymentSpec.parse(dict(spec)),
        "serving": Serving(3, replicas, 1, "r1"),
        "pods": pods,
        "routers": ROUTERS,
        "plan": KVPlan("True", "Planned", "a sum", 100, 6400, 100),
    }
    return Snapshot(**made | fields)


def said(found: Snapshot) -> dict[str, Verdict]:
    return {verdict.type: verdict for verdict in verdicts(found)}


def reasons(found: Snapshot) -> dict[str, tuple[str, str]]:
    return {kind: (verdict.status, verdict.reason) for kind, verdict in said(found).items()}


SERVING = [pod(0, is_ready=True), pod(1, is_ready=True)]


def test_all_is_well() -> None:
    found = reasons(snapshot(SERVING, capacities=[Capacity("e-0", "u0", 97, 64)]))
    assert found == {
        "Available": ("True", "Serving"),
        "Ready": ("True", "RolledOut"),
        "Progressing": ("False", "RolledOut"),
        "Stalled": ("False", "NoPodStalled"),
        "RouterReady": ("True", "RoutersServe"),
        "KVPlanned": ("True", "Planned"),
        "KVPlanMatched": ("True", "Matched"),
        "ModelReady": ("True", "Bundled"),
        "AuthReady": ("True", "NoKeysAsked"),
    }


def test_ready_is_never_true_on_behalf_of_old_pods() -> None:
    found = reasons(snapshot([pod(0, "r0", is_ready=True), pod(1, "r0", is_ready=True)]))
    assert found["Available"] == ("True", "Serving")
    assert found["Ready"] == ("False", "RollingOut")
    behind = reasons(snapshot(SERVING, serving=Serving(2, 2, 1, "r1")))
    assert (behind["Available"][0], behind["Ready"]) == ("True", ("False", "NotApplied"))


def test_available_tells_whether_anyone_is_served() -> None:
    assert reasons(snapshot([pod(0, "r0", is_ready=True), pod(1)]))["Available"] == ("True", "Serving")
    assert reasons(snapshot([pod(0), pod(1)]))["Available"] == ("False", "NoReadyPods")
    four = [pod(0, is_ready=True), pod(1, is_ready=True), pod(2), pod(3)]
    assert reasons(snapshot(four, replicas=4))["Available"] == ("False", "BelowFloor")
    assert reasons(snapshot([pod(0)], replicas=1))["Available"] == ("False", "NoReadyPods")
    assert reasons(snapshot([], replicas=0))["Available"] == ("False", "ScaledToZero")
    assert reasons(snapshot([], serving=None))["Available"] == ("False", "NoPods")


def test_nobody_is_served_without_a_router() -> None:
    nobody = replace(ROUTERS, pods=[router("r-a", is_ready=False), router("r-b", is_ready=False)])
    found = said(snapshot(SERVING, routers=nobody))
    assert found["Available"] == Verdict(
        "Available", "False", "NoReadyRouters", "2 of 2 pods are ready, and no router is: see RouterReady"
    )
    assert reasons(snapshot(SERVING, routers=replace(nobody, is_bypassed=True)))["Available"] == ("True", "Serving")
    one = replace(ROUTERS, pods=[router("r-a"), router("r-b", is_ready=False)])
    assert said(snapshot(SERVING, routers=one))["Available"].message == "2 of 2 pods serve, through 1 of 2 routers"


def test_a_pod_serves_when_some_router_sends_requests_to_it() -> None:
    def available(told: dict[str, set[str]], replicas: int = 2) -> tuple[str, str]:
        known = {uid: frozenset(engines) for uid, engines in told.items()}
        found = snapshot(SERVING[:replicas], replicas=replicas, routers=replace(ROUTERS, told=known))
        return reasons(found)["Available"]

    assert available({"r-a": {"u0", "u1"}, "r-b": set()}) == ("True", "Serving")
    assert available({"r-a": set(), "r-b": set()}) == ("False", "BelowFloor")
    assert available({"r-a": {"u0"}, "r-b": set()}) == ("True", "Serving"), "the floor of two is one"
    assert available({"r-a": set(), "r-b": set()}, replicas=1) == ("False", "BelowFloor")
    assert available({"r-a": set()}) == ("True", "Serving"), "nobody could ask the other"


def test_ready_includes_the_routers_rollout() -> None:
    rolling = snapshot(SERVING, routers=replace(ROUTERS, is_rolled_out=False))
    assert reasons(rolling)["Ready"] == ("False", "RoutersStarting")
    assert reasons(rolling)["Progressing"] == ("True", "RoutersStarting")
    assert said(rolling)["Ready"].message == "2 of 2 routers are ready; they are being replaced"
    both = snapshot([pod(0, "r0", is_ready=True), pod(1)], routers=replace(ROUTERS, is_rolled_out=False))
    assert reasons(both)["Progressing"] == ("True", "WaitingForPods"), "the engines' first"


def test_router_ready_tells_whether_requests_find_routers() -> None:
    def found(replicas: int, *pods: Pod) -> Verdict:
        return said(snapshot(SERVING, routers=Routers(replicas, False, pods)))["RouterReady"]

    away = router("r-b", is_ready=False)
    stuck = router("r-b", is_ready=False, trouble=Trouble("ImagePullBackOff", "no such image"))
    assert found(0) == Verdict("RouterReady", "False", "NoRouters", "there are no routers yet")
    assert found(2, router("r-a"), away).status == "True"
    assert found(1, router("r-a")).status == "True"
    assert found(1, away) == Verdict("RouterReady", "False", "NoReadyRouters", "0 of 1 routers are ready")
    few = found(4, router("r-a"), away)
    assert few == Verdict("RouterReady", "False", "TooFewRouters", "1 of 4 routers are ready, at least 3 should be")
    assert found(1, stuck) == Verdict("RouterReady", "False", "ImagePullBackOff", "r-b: no such image")
    assert found(2, router("r-a"), stuck).reason == "RoutersServe"


def test_routers_that_may_not_be_made_say_why() -> None:
    refused = Routers(2, False, [], refusal=Trouble("FailedCreate", "pods are forbidden: exceeded quota"))
    found = said(snapshot(SERVING, routers=refused))
    why = "routers: pods are forbidden: exceeded quota"
    assert found["RouterReady"] == Verdict("RouterReady", "False", "FailedCreate", why)
    assert found["Stalled"] == Verdict("Stalled", "True", "FailedCreate", why)
    enough = replace(refused, pods=[router("r-a")])
    assert reasons(snapshot(SERVING, routers=enough))["RouterReady"] == ("True", "RoutersServe")


def test_engines_that_may_not_be_made_say_why_in_stalled_before_routers() -> None:
    why = Trouble("FailedCreate", "pods are forbidden: exceeded quota")
    refused = snapshot(SERVING[:1], refusal=why, routers=replace(ROUTERS, refusal=Trouble("FailedCreate", "no")))
    message = "engines: pods are forbidden: exceeded quota"
    assert said(refused)["Stalled"] == Verdict("Stalled", "True", "FailedCreate", message)
    stuck = pod(0, trouble=Trouble("ImagePullBackOff", "no such image"))
    assert said(snapshot([stuck], refusal=why))["Stalled"].reason == "ImagePullBackOff", "a pod's own words come first"


def test_pods_are_lacking_while_a_wanted_one_has_not_been_made() -> None:
    serving = Serving(3, 2, 1, "r1")
    assert not lacks_pods(serving, SERVING)
    assert lacks_pods(serving, SERVING[:1])
    assert lacks_pods(serving, [SERVING[0], pod(2, is_terminating=True)]), "one that a scale-down takes away is none"
    assert not lacks_pods(replace(serving, replicas=0), [])


def test_a_router_that_does_not_come_up_shows_in_stalled_after_engines() -> None:
    stuck = router("r-b", is_ready=False, trouble=Trouble("CrashLoopBackOff", "it ends"))
    routers = replace(ROUTERS, pods=[router("r-a"), stuck])
    assert said(snapshot(SERVING, routers=routers))["Stalled"] == Verdict(
        "Stalled", "True", "CrashLoopBackOff", "r-b: it ends"
    )
    engine = pod(1, trouble=Trouble("Error", "it ended"))
    assert said(snapshot([SERVING[0], engine], routers=routers))["Stalled"].message == "e-1: it ended"


def test_an_inference_pool_tells_what_gateways_say_of_it() -> None:
    pooled = {**DEMO, "gateway": {"inferencePool": {"endpointPickerRef": {"name": "picker"}}}}

    def found(pool: Mapping[str, Any] | None, **fields: Any) -> Verdict:
        return said(snapshot(SERVING, spec=pooled, inference_pool=pool, **fields))["InferencePoolReady"]

    def parents(*conditions: tuple[str, str, str]) -> Mapping[str, Any]:
        made = [{"type": kind, "status": state, "reason": why, "message": "words"} for kind, state, why in conditions]
        return {"status": {"parents": [{"conditions": made}]}}

    assert "InferencePoolReady" not in said(snapshot(SERVING))
    lacking = found(None, missing_apis=["inference.networking.k8s.io/v1"])
    assert (lacking.reason, "inference.networking.k8s.io/v1" in lacking.message) == ("APIMissing", True)
    assert (found(None).status, found(None).reason) == ("Unknown", "NotMade")
    assert found({}).reason == "NoNews"
    assert found(parents(("Accepted", "True", "Accepted"))).status == "True"
    broken = found(parents(("Accepted", "True", "Accepted"), ("ResolvedRefs", "False", "InvalidExtensionRef")))
    assert broken == Verdict("InferencePoolReady", "False", "InvalidExtensionRef", "words")


def test_a_frozen_spec_says_why_and_which_generation_serves() -> None:
    frozen = snapshot(SERVING, freeze=Refused("DoesNotFit", "141 GiB are not enough"), serving=Serving(2, 2, 1, "r1"))
    assert said(frozen)["Ready"] == Verdict(
        "Ready", "False", "DoesNotFit", "141 GiB are not enough; generation 2 serves on"
    )
    assert reasons(frozen)["Available"] == ("True", "Serving")
    nothing = snapshot([], freeze=Refused("TensorParallelUnavailable", "not yet"), serving=None)
    assert reasons(nothing)["TensorParallelUnavailable"] == ("True", "TensorParallelUnavailable")
    assert reasons(nothing)["Progressing"] == ("False", "TensorParallelUnavailable")


def test_a_spec_that_cannot_be_read_is_said_and_the_pods_still_count() -> None:
    found = reasons(_unreadable())
    assert found["Ready"] == ("False", "SpecUnreadable")
    assert found["Available"] == ("True", "Serving")
    assert found["AuthReady"][0] == found["ModelReady"][0] == found["KVPlanned"][0] == "Unknown"


def _unreadable() -> Snapshot:
    return replace(snapshot(SERVING), spec=None, plan=None, freeze=Refused("SpecUnreadable", "spec.kv: no such field"))


def test_a_stuck_pod_shows_with_its_own_message() -> None:
    stuck = pod(1, trouble=Trouble("ImagePullBackOff", "no such image: x"))
    verdict = said(snapshot([pod(0, is_ready=True), stuck]))["Stalled"]
    assert verdict == Verdict("Stalled", "True", "ImagePullBackOff", "e-1: no such image: x")
    well_again = replace(stuck, is_ready=True)
    assert said(snapshot([pod(0, is_ready=True), well_again]))["Stalled"].status == "False"


def test_measured_pages_stand_beside_the_plan() -> None:
    fewer = snapshot(SERVING, capacities=[Capacity("e-0", "u0", 100, 64), Capacity("e-1", "u1", 60, 64)])
    assert reasons(fewer)["KVPlanMatched"] == ("False", "FewerPages")
    assert "measured 60 pages on e-1" in said(fewer)["KVPlanMatched"].message
    more = snapshot(SERVING, capacities=[Capacity("e-0", "u0", 140, 64)])
    assert reasons(more)["KVPlanMatched"] == ("False", "MorePages")
    ranged = replace(more, plan=KVPlan("True", "Planned", "", 100, 6400, 150))
    assert reasons(ranged)["KVPlanMatched"] == ("True", "Matched")
    unplanned = replace(more, plan=KVPlan("Unknown", "NoFacts", ""))
    assert reasons(unplanned)["KVPlanMatched"] == ("Unknown", "NotPlanned")


def test_a_secret_that_is_not_there_shows_in_auth_ready() -> None:
    keys = {**DEMO, "auth": {"apiKeysSecret": "keys"}}
    missing = pod(1, trouble=Trouble("FailedMount", 'MountVolume.SetUp failed: secret "keys" not found'))
    assert reasons(snapshot([pod(0), missing], spec=keys))["AuthReady"] == ("False", "SecretNotMounted")
    assert reasons(snapshot([pod(0)], spec=keys))["AuthReady"] == ("Unknown", "NoReadyPods")
    assert reasons(snapshot(SERVING, spec=keys))["AuthReady"] == ("True", "KeysRead")
    words = "prism-serve ended with exit code 1: http.api_keys_file: /etc/prism/api-keys holds no key"
    empty = pod(0, trouble=Trouble("Error", words))
    assert said(snapshot([empty], spec=keys))["AuthReady"] == Verdict("AuthReady", "False", "BadKeys", f"e-0: {words}")
    bad = snapshot(SERVING, spec=keys, capacities=[Capacity("e-0", "u0", 100, 64, "the file holds no key")])
    assert reasons(bad)["AuthReady"] == ("False", "BadKeys")


def test_where_the_models_files_stand() -> None:
    on_claim = {"model": {"source": {"pvc": {"claimName": "files"}}}, "replicas": 2}
    claim = {"metadata": {"name": "files"}, "spec": {"accessModes": ["ReadWriteOnce"]}}
    assert reasons(snapshot([], spec=on_claim))["ModelReady"] == ("False", "ClaimNotFound")
    assert reasons(snapshot([], spec=on_claim, claim=claim))["ModelReady"] == ("False", "AccessMode")
    shared = {**claim, "spec": {"accessModes": ["ReadOnlyMany"]}}
    assert reasons(snapshot([], spec=on_claim, claim=shared))["ModelReady"] == ("Unknown", "NotLoadedYet")
    assert reasons(snapshot(SERVING, spec=on_claim, claim=shared))["ModelReady"] == ("True", "Loaded")

    hub = {"model": {"source": {"huggingFace": {"repository": "a/b"}}}}
    store = {"metadata": {"name": "store"}, "spec": {"accessModes": ["ReadWriteMany"]}}
    job: dict[str, Any] = {"metadata": {"name": "job"}, "status": {}}
    assert reasons(snapshot([], spec=hub, claim=store, loader_job=job))["ModelReady"] == ("False", "Downloading")
    unauthorized = snapshot(
        [], spec=hub, claim=store, loader_job=job, loader_trouble=Trouble("Unauthorized", "the hub says 401")
    )
    assert said(unauthorized)["ModelReady"] == Verdict("ModelReady", "False", "Unauthorized", "the hub says 401")
    job["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    assert reasons(snapshot([], spec=hub, claim=store, loader_job=job))["ModelReady"] == ("True", "Downloaded")


def test_a_workload_that_waits_for_its_model_says_so() -> None:
    first = reasons(snapshot([], serving=None, awaits_download=True))
    assert first["Ready"] == ("False", "AwaitingModel")
    assert first["Progressing"] == ("False", "AwaitingModel")
    other = snapshot(SERVING, serving=Serving(2, 2, 1, "r1"), awaits_download=True)
    assert reasons(other)["Available"] == ("True", "Serving")
    assert said(other)["Ready"].message == "the download comes first, see ModelReady; generation 2 serves on"


def test_a_broken_autoscaler_shows_in_a_condition() -> None:
    scaled = {**DEMO, "autoscaling": {}}
    inactive = {"type": "ScalingActive", "status": "False", "reason": "FailedGetPodsMetric", "message": "no metric"}
    broken = snapshot(SERVING, spec=scaled, autoscaler={"status": {"conditions": [inactive]}})
    assert said(broken)["AutoscalingReady"] == Verdict("AutoscalingReady", "False", "FailedGetPodsMetric", "no metric")
    works = {"status": {"conditions": [{**inactive, "status": "True"}]}}
    assert reasons(snapshot(SERVING, spec=scaled, autoscaler=works))["AutoscalingReady"] == ("True", "Scaling")
    assert "AutoscalingReady" not in said(snapshot(SERVING))
    lacking = snapshot(SERVING, spec=scaled, missing_apis=["keda.sh/v1alpha1"])
    assert said(lacking)["AutoscalingReady"].message == "this cluster does not serve keda.sh/v1alpha1"


def test_somebody_elses_child_is_a_conflict() -> None:
    found = snapshot(SERVING, problems=[Problem(True, "Service demo", "it belongs to nobody")])
    assert reasons(found)["ChildConflict"] == ("True", "NotOurs")
    assert reasons(found)["Ready"] == ("False", "ChildConflict")


def test_the_time_of_a_condition_moves_only_when_its_status_flips() -> None:
    first = next_status(snapshot(SERVING), PrismDeploymentStatus(), NOW)
    later = NOW + timedelta(minutes=5)
    rolling = snapshot([pod(0, "r0", is_ready=True), pod(1, is_ready=True)])
    second = next_status(rolling, first, later)
    times = {c.type: c.last_transition_time for c in second.conditions}
    assert times["Ready"] == "2026-01-02T03:09:05Z"
    assert times["Available"] == "2026-01-02T03:04:05Z"
    assert all(c.observed_generation == 3 for c in second.conditions)
    assert {c.type for c in transitions(first.conditions, second.conditions)} == {"Ready", "Progressing"}


def test_a_second_look_at_the_same_state_is_the_same_status() -> None:
    found = snapshot(SERVING, capacities=[Capacity("e-0", "u0", 97, 64)])
    first = next_status(found, PrismDeploymentStatus(), NOW)
    again = next_status(found, PrismDeploymentStatus.parse(first.to_object()), NOW + timedelta(hours=1))
    assert again == first
    assert not is_due(first, again, since_write_s=1e9, min_interval_s=30)


def test_measured_pages_alone_are_written_at_most_once_an_interval() -> None:
    first = next_status(snapshot(SERVING, capacities=[Capacity("e-0", "u0", 97, 64)]), PrismDeploymentStatus(), NOW)
    second = next_status(snapshot(SERVING, capacities=[Capacity("e-0", "u0", 96, 64)]), first, NOW)
    assert (second.measured_pages, second.measured_tokens) == (96, 96 * 64)
    assert not is_due(first, second, since_write_s=29.0, min_interval_s=30.0)
    assert is_due(first, second, since_write_s=30.0, min_interval_s=30.0)
    news = next_status(snapshot([pod(0, is_ready=True), pod(1)]), first, NOW)
    assert is_due(first, news, since_write_s=0.0, min_interval_s=30.0)


def test_measured_pages_stay_known_while_no_pod_answers() -> None:
    first = next_status(snapshot(SERVING, capacities=[Capacity("e-0", "u0", 97, 64)]), PrismDeploymentStatus(), NOW)
    assert next_status(snapshot([pod(0), pod(1)]), first, NOW).measured_pages == 97
