"""Pods that wait: which of their words still hold, and that one cause has one reason however often it is tried."""

from __future__ import annotations

from typing import Any

import pytest

from prism_operator.conditions import auth_ready
from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.observe import _with_events
from prism_operator.pods import Pod, Trouble, held_back_by
from prism_operator.rollout import Moves, Phase
from prism_operator.snapshot import Snapshot

UNMOUNTED = 'MountVolume.SetUp failed for volume "api-keys" : secret "keys" not found'


def event(reason: str, second: int, message: str = "", kind: str = "Warning") -> dict[str, Any]:
    seen = f"2026-01-01T00:00:{second:02}Z"
    return {"metadata": {}, "type": kind, "reason": reason, "message": message, "lastTimestamp": seen}


def normal(reason: str, second: int) -> dict[str, Any]:
    return event(reason, second, kind="Normal")


def test_a_pod_that_has_a_node_by_now_is_not_held_back_for_want_of_one() -> None:
    unscheduled = event("FailedScheduling", 5, "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.")
    assert held_back_by([unscheduled, normal("Scheduled", 5)]) is None
    assert held_back_by([unscheduled, normal("Scheduled", 5), normal("Pulling", 6)]) is None


def test_a_volume_that_came_in_the_end_does_not_hold_back_a_pod_that_pulls_its_image() -> None:
    slow = event("FailedMount", 7, "failed to sync secret cache: timed out waiting for the condition")
    assert held_back_by([normal("Scheduled", 6), slow]) == Trouble("FailedMount", slow["message"])
    assert held_back_by([normal("Scheduled", 6), slow, normal("Pulling", 7)]) is None
    assert held_back_by([normal("Pulling", 7), slow | event("FailedMount", 9, "again")]) == Trouble(
        "FailedMount", "again"
    )


def test_a_missing_secret_holds_back_from_the_second_in_which_the_pod_got_its_node() -> None:
    assert held_back_by([normal("Scheduled", 6), event("FailedMount", 6, UNMOUNTED)]) == Trouble(
        "FailedMount", UNMOUNTED
    )
    assert held_back_by([]) is None


def container(reason: str, message: str) -> dict[str, Any]:
    waiting = {"waiting": {"reason": reason, "message": message}}
    return {
        "metadata": {"name": "e-0", "uid": "u", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"nodeName": "n"},
        "status": {"containerStatuses": [{"name": "prism-serve", "ready": False, "state": waiting, "lastState": {}}]},
    }


def test_an_image_that_does_not_come_has_one_reason_at_every_stage_of_a_try() -> None:
    pull = 'Failed to pull image "prism:x": not found'
    told = [normal("Pulling", 3), event("Failed", 4, pull), event("Failed", 4, "Error: ErrImagePull")]
    found = [
        held_back_by(told),
        Pod.from_object(container("ErrImagePull", "not found")).trouble,
        Pod.from_object(container("ImagePullBackOff", 'Back-off pulling image "prism:x"')).trouble,
    ]
    assert [trouble and trouble.reason for trouble in found] == ["ImagePullBackOff"] * 3
    assert found[0] == Trouble("ImagePullBackOff", pull), "the longer word says more"


@pytest.mark.parametrize("reason", ["InvalidImageName", "ErrImageNeverPull", "CreateContainerConfigError"])
def test_other_reasons_of_a_container_stand(reason: str) -> None:
    trouble = Pod.from_object(container(reason, "no")).trouble
    assert trouble == Trouble(reason, "no")
    assert held_back_by([event("Failed", 1, "failed to create shim task")]) == Trouble(
        "Failed", "failed to create shim task"
    )


def test_all_events_of_a_pod_are_read_since_normal_ones_end_a_trouble() -> None:
    asked: list[str] = []

    class Events:
        def list(self, kind: object, namespace: str, fields: str) -> list[dict[str, Any]]:
            asked.append(fields)
            return [event("FailedMount", 5, UNMOUNTED), normal("Pulled", 6)]

    pod = Pod("e-0", "u0", "r1", 0, is_held_back=True)
    assert _with_events(Events(), "ns", pod).trouble is None  # type: ignore[arg-type]
    assert asked == ["involvedObject.uid=u0"]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (UNMOUNTED, "SecretNotMounted"),
        ('object "team"/"keys" not registered', "SecretNotMounted"),
        ('Back-off pulling image "registry/monkeys:1"', "NoReadyPods"),
        ("0/3 nodes are available, see keys", "NoReadyPods"),
    ],
)
def test_only_a_trouble_that_names_the_secret_is_the_secrets(message: str, expected: str) -> None:
    spec = PrismDeploymentSpec.parse({"model": {"source": {"demo": {}}}, "auth": {"apiKeysSecret": "keys"}})
    pod = Pod("e-0", "u0", "r1", 0, trouble=Trouble("FailedMount", message))
    assert auth_ready(Snapshot(1, Moves(Phase.STARTING, ""), spec, pods=[pod])).reason == expected
