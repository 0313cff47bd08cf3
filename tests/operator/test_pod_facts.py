"""What a pod says of itself."""

from __future__ import annotations

from typing import Any

import pytest

from prism_operator.pods import MESSAGE_CHARS, Pod, Trouble, creation_refused, lost_nodes


def body(status: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    labels = {"controller-revision-hash": "demo-engine-7d"}
    return {
        "metadata": {
            "name": "demo-engine-11",
            "uid": "u",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": labels,
            **metadata,
        },
        "spec": {"nodeName": "n"},
        "status": status or {},
    }


def container(state: dict[str, Any], last: dict[str, Any] | None = None, *, ready: bool = False) -> dict[str, Any]:
    return {"containerStatuses": [{"name": "prism-serve", "ready": ready, "state": state, "lastState": last or {}}]}


READY = {"conditions": [{"type": "Ready", "status": "True"}]}
CRASH = {"terminated": {"exitCode": 2, "reason": "Error", "message": "settings: kv.dtpe: no such option\n"}}


def test_identity_readiness_and_leaving() -> None:
    pod = Pod.from_object(body(READY))
    assert (pod.ordinal, pod.revision, pod.is_ready, pod.node) == (11, "demo-engine-7d", True, "n")
    leaving = Pod.from_object(body(READY, deletionTimestamp="2026-01-01T00:00:30Z"))
    assert (leaving.is_ready, leaving.is_terminating) == (False, True)
    assert leaving.gone_by_s == 1767225630.0


@pytest.mark.parametrize(
    ("phase", "is_finished"), [("Failed", True), ("Succeeded", True), ("Running", False), ("", False)]
)
def test_a_pod_is_finished_when_it_will_never_run_again(phase: str, is_finished: bool) -> None:
    pod = Pod.from_object(body({"phase": phase, "reason": "Evicted", "message": "the node was low on memory"}))
    assert pod.is_finished is is_finished


@pytest.mark.parametrize(
    ("status", "reason", "message"),
    [
        ({"phase": "Failed", "reason": "Evicted", "message": "low on memory"}, "Evicted", "low on memory"),
        (
            {"conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1"}]},
            "Unschedulable",
            "0/1",
        ),
        (container({"waiting": {"reason": "ImagePullBackOff", "message": "no"}}), "ImagePullBackOff", "no"),
        (
            container({"waiting": {"reason": "CrashLoopBackOff"}}, CRASH),
            "Error",
            "prism-serve ended with exit code 2: settings: kv.dtpe: no such option",
        ),
        (
            container({"running": {}}, CRASH),
            "Error",
            "prism-serve ended with exit code 2: settings: kv.dtpe: no such option",
        ),
    ],
)
def test_trouble_is_told_in_the_pods_own_words(status: dict[str, Any], reason: str, message: str) -> None:
    trouble = Pod.from_object(body(status)).trouble
    assert trouble is not None
    assert (trouble.reason, trouble.message) == (reason, message)


def test_of_much_that_a_container_has_said_its_end_is_told() -> None:
    """The kubelet hands over the last 2048 bytes of its log: lines of requests, and why it ended below them."""
    said = "".join(f"line {number} of a request\n" for number in range(90)) + "prism-serve: fault: it stands still\n"
    ended = {"terminated": {"exitCode": 1, "reason": "Error", "message": said[-2048:]}}
    trouble = Pod.from_object(body(container({"running": {}}, ended))).trouble
    assert trouble is not None
    assert trouble.message.startswith("prism-serve ended with exit code 1: ")
    assert trouble.message.endswith("\nprism-serve: fault: it stands still")
    assert len(trouble.message) == MESSAGE_CHARS


@pytest.mark.parametrize(
    "status",
    [
        container({"waiting": {"reason": "ContainerCreating"}}),
        container({"running": {}}),
        container({"running": {}}, CRASH, ready=True),
        {},
    ],
)
def test_a_young_pod_or_a_serving_one_has_no_trouble(status: dict[str, Any]) -> None:
    assert Pod.from_object(body(status)).trouble is None


def test_a_pod_that_waits_for_a_volume_is_held_back() -> None:
    assert Pod.from_object(body(container({"waiting": {"reason": "ContainerCreating"}}))).is_held_back
    assert not Pod.from_object(body(container({"running": {}}))).is_held_back


def test_nodes_that_are_not_known_to_be_ready_are_lost() -> None:
    def node(name: str, status: str) -> dict[str, Any]:
        return {"metadata": {"name": name}, "status": {"conditions": [{"type": "Ready", "status": status}]}}

    assert lost_nodes([node("a", "True"), node("b", "Unknown"), node("c", "False")]) == {"b", "c"}


def event(reason: str, second: int, message: str = "", **fields: Any) -> dict[str, Any]:
    made = {"creationTimestamp": "2026-01-01T00:00:00Z"}
    return {
        "metadata": made,
        "reason": reason,
        "message": message,
        "lastTimestamp": f"2026-01-01T00:00:{second:02}Z",
    } | fields


REFUSED = "create Pod demo-engine-2 in StatefulSet demo-engine failed error: exceeded quota: team"


def test_a_pod_that_may_not_be_made_is_known_by_the_last_event_of_its_workload() -> None:
    failed = event("FailedCreate", 5, REFUSED)
    assert creation_refused([]) is None
    assert creation_refused([failed]) == Trouble("FailedCreate", REFUSED)
    assert creation_refused([event("SuccessfulCreate", 4), failed, event("SuccessfulDelete", 9)]) is not None
    assert creation_refused([failed, event("SuccessfulCreate", 6)]) is None, "there was room again"
    same = [event("SuccessfulCreate", 5), failed]
    assert creation_refused(same) == creation_refused(same[::-1]) == Trouble("FailedCreate", REFUSED)


def test_an_event_counts_from_when_it_was_seen_last_in_either_form() -> None:
    made = event("SuccessfulCreate", 30)
    series = {"count": 9, "lastObservedTime": "2026-01-01T00:00:40.000001Z"}
    again = event("FailedCreate", 0, lastTimestamp=None, eventTime="2026-01-01T00:00:01.5Z", series=series)
    once = event("FailedCreate", 0, lastTimestamp=None, eventTime="2026-01-01T00:00:01.5Z")
    assert creation_refused([made, again]) is not None
    assert creation_refused([made, once]) is None
