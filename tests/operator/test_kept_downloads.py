"""Downloads that are whole stay so, until the claim that holds them is gone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from prism_operator.apply import ChildKey
from prism_operator.intent import Intent, hold_back, intend, keep_download
from prism_operator.model_files import is_lost
from prism_operator.options import OperatorOptions

HUB = {"repository": "Qwen/Qwen3-VL-2B-Instruct"}
Live = dict[ChildKey, dict[str, Any]]


def intent(hub: Mapping[str, Any] = HUB, live: Live | None = None, **spec: Any) -> Intent:
    metadata = {"name": "demo", "namespace": "ns", "uid": "u", "generation": 2}
    body = {"metadata": metadata, "spec": {"model": {"source": {"huggingFace": dict(hub)}}, **spec}}
    there = (live or {}).get(("StatefulSet", "demo-engine"))
    return intend(body, OperatorOptions(), there, None, frozenset())


def applied(found: Intent, *, is_complete: bool = True) -> Live:
    assert found.children is not None
    live = {(child["kind"], child["metadata"]["name"]): dict(child) for child in found.children}
    for (kind, _), body in live.items():
        if kind == "Job" and is_complete:
            body["status"] = {"conditions": [{"type": "Complete", "status": "True"}]}
    return live


def names(found: Intent | Live, kind: str) -> list[str]:
    keys = (
        [(child["kind"], child["metadata"]["name"]) for child in found.children or ()]
        if isinstance(found, Intent)
        else [*found]
    )
    return [name for its_kind, name in keys if its_kind == kind]


@pytest.mark.parametrize(
    ("hub", "spec"),
    [
        (HUB, {"podTemplate": {"nodeSelector": {"pool": "new"}}}),
        (HUB, {"podTemplate": {"imagePullSecrets": ["registry"]}}),
        ({**HUB, "tokenSecret": {"name": "another"}}, {}),
    ],
    ids=["nodes", "pull secrets", "token"],
)
def test_the_same_files_are_not_loaded_again_for_another_place_or_token(
    hub: dict[str, Any], spec: dict[str, Any]
) -> None:
    """The engine that serves may hold a claim for one node: a second loader elsewhere would never start."""
    live = applied(intent())
    wanted = intent(hub, live, **spec)
    assert names(wanted, "Job") != names(live, "Job"), "else there is nothing to keep"
    kept = hold_back(keep_download(wanted, live), live)
    assert names(kept, "Job") == names(live, "Job")
    assert not kept.awaits_download
    assert [child for child in kept.children or () if child["kind"] != "Job"] == [
        child for child in wanted.children or () if child["kind"] != "Job"
    ]


@pytest.mark.parametrize(
    "hub",
    [
        {**HUB, "revision": "v2"},
        {"repository": "Qwen/Qwen3-VL-4B-Instruct"},
        {**HUB, "endpoint": "https://mirror.example.org"},
        {**HUB, "storage": {"claimName": "files"}},
    ],
    ids=["revision", "repository", "endpoint", "claim"],
)
def test_other_files_or_another_claim_are_another_download(hub: dict[str, Any]) -> None:
    live = applied(intent())
    wanted = intent(hub, live)
    kept = keep_download(wanted, live)
    assert kept == wanted
    assert hold_back(kept, live).awaits_download


def test_a_download_that_is_not_whole_is_begun_anew_where_engines_may_run_now() -> None:
    live = applied(intent(), is_complete=False)
    wanted = intent(podTemplate={"nodeSelector": {"pool": "new"}})
    assert keep_download(wanted, live) == wanted


def loaded(completed: str, claim: str = "demo-models") -> dict[str, Any]:
    volumes = [{"name": "model", "persistentVolumeClaim": {"claimName": claim}}]
    return {
        "metadata": {"name": "demo-loader-1"},
        "spec": {"template": {"spec": {"volumes": volumes}}},
        "status": {"conditions": [{"type": "Complete", "status": "True"}], "completionTime": completed},
    }


def test_a_download_is_lost_with_its_claim() -> None:
    claim = {"metadata": {"name": "demo-models", "creationTimestamp": "2026-01-02T00:00:00Z"}}
    assert is_lost(loaded("2026-01-01T00:00:00Z"), claim)
    assert not is_lost(loaded("2026-01-02T00:10:00Z"), claim), "it came into this very claim"
    assert not is_lost(loaded("2026-01-01T00:00:00Z"), None), "nobody knows of one that is younger"
    assert not is_lost(loaded("2026-01-01T00:00:00Z", "files"), claim), "it is somebody's own"
    running = loaded("2026-01-01T00:00:00Z") | {"status": {}}
    assert not is_lost(running, claim)
