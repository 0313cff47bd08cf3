"""When an object has to be applied again."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from prism_operator.drift import needs_apply, stamped

WANTED: dict[str, Any] = {
    "apiVersion": "apps/v1",
    "kind": "StatefulSet",
    "metadata": {"name": "e", "labels": {"a": "b"}},
    "spec": {
        "replicas": 2,
        "template": {
            "spec": {
                "containers": [
                    {
                        "name": "c",
                        "image": "i:1",
                        "resources": {"limits": {"memory": "1024Mi", "cpu": "1000m"}},
                        "env": [{"name": "A", "value": ""}],
                    }
                ]
            }
        },
    },
}


def live() -> dict[str, Any]:
    """As the API server gives it back: defaults, other spellings of quantities, no empty strings, other people's."""
    found = copy.deepcopy(stamped(WANTED))
    found["metadata"] |= {"uid": "u", "resourceVersion": "7"}
    found["metadata"]["annotations"]["somebody"] = "else"
    container = found["spec"]["template"]["spec"]["containers"][0]
    container["resources"]["limits"] = {"memory": "1Gi", "cpu": "1", "nvidia.com/gpu": "1"}
    container["env"] = [{"name": "A"}]
    container["terminationMessagePath"] = "/dev/termination-log"
    found["spec"]["template"]["spec"]["containers"].insert(0, {"name": "injected", "image": "x"})
    found["status"] = {"replicas": 2}
    return found


def test_what_is_as_wanted_is_left_alone() -> None:
    assert not needs_apply(stamped(WANTED), live())


def test_what_is_absent_is_applied() -> None:
    assert needs_apply(stamped(WANTED), None)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("spec", "replicas"), 3),
        (("metadata", "labels", "a"), "c"),
        (("spec", "template", "spec", "containers", 1, "image"), "i:2"),
        (("spec", "template", "spec", "containers", 1, "resources", "limits", "memory"), "2Gi"),
    ],
)
def test_what_others_have_changed_is_applied_again(path: tuple[str | int, ...], value: object) -> None:
    found = live()
    place: Any = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert needs_apply(stamped(WANTED), found)


def test_a_field_that_has_left_the_spec_is_applied_again() -> None:
    fewer = copy.deepcopy(WANTED)
    del fewer["spec"]["template"]["spec"]["containers"][0]["env"]
    assert needs_apply(stamped(fewer), live())
