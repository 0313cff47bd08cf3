"""Specs that people write: the examples are right, and what is wrong is refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from structural_schema import faults, with_defaults

from prism_operator.children.config import settings_of
from prism_operator.crd.base import GROUP, KIND, VERSION
from prism_operator.crd.schema import crd
from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.crd.status import Condition, PrismDeploymentStatus

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))
SCHEMA = crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
SPEC, STATUS = SCHEMA["properties"]["spec"], SCHEMA["properties"]["status"]


def load(path: Path) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return document


def example(path: Path) -> PrismDeploymentSpec:
    return PrismDeploymentSpec.parse(load(path)["spec"])


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_taken_by_the_schema_and_by_the_models(path: Path) -> None:
    body = load(path)
    assert (body["apiVersion"], body["kind"]) == (f"{GROUP}/{VERSION}", KIND)
    assert faults(SPEC, body["spec"]) == []
    stored = with_defaults(SPEC, body["spec"])
    assert example(path) == PrismDeploymentSpec.parse(stored)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_keep_the_rules_across_fields(path: Path) -> None:
    spec = example(path)
    assert spec.engine.request_timeout_seconds <= spec.drain.stream_seconds
    assert spec.gpu.sharing == "none" or spec.gpu.memory is not None
    assert spec.engine.tensor_parallel == 1 or "mig-" not in spec.gpu.resource_name


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_give_settings_that_the_engine_takes(path: Path) -> None:
    spec = example(path)
    settings = settings_of(spec)
    assert settings.model.served_name == spec.model.served_name
    assert settings.engine.max_context_tokens == spec.engine.max_context_tokens


def test_the_examples_cover_every_source_that_needs_no_privilege() -> None:
    covered = {name for path in EXAMPLES for name in load(path)["spec"]["model"]["source"]}
    assert covered == {"demo", "pvc", "huggingFace", "image"}


def test_an_autoscaled_example_leaves_replicas_to_the_autoscaler() -> None:
    autoscaled = [spec for spec in (load(path)["spec"] for path in EXAMPLES) if "autoscaling" in spec]
    assert autoscaled
    assert all("replicas" not in spec for spec in autoscaled)


DEMO: dict[str, Any] = {"source": {"demo": {}}}
HUB = "huggingFace"

BAD: list[tuple[str, dict[str, Any]]] = [
    ("no model", {}),
    ("no source", {"model": {}}),
    ("a field that is not there", {"model": DEMO, "replcas": 2}),
    ("snake case", {"model": DEMO, "pod_template": {"node_selectr": {}}}),
    ("three cards", {"model": DEMO, "engine": {"tensorParallel": 3}}),
    ("a switch as a number of cards", {"model": DEMO, "engine": {"tensorParallel": True}}),
    ("a switch as text", {"model": DEMO, "engine": {"prefixCache": "true"}}),
    ("a number as text", {"model": DEMO, "replicas": "2"}),
    ("a fraction of replicas", {"model": DEMO, "replicas": 1.5}),
    ("too many replicas", {"model": DEMO, "replicas": 513}),
    ("an unknown type of KV", {"model": DEMO, "kv": {"dtype": "int4"}}),
    ("an unknown page", {"model": DEMO, "kv": {"pageTokens": 48}}),
    ("the whole card", {"model": DEMO, "kv": {"memoryFractionPercent": 100}}),
    ("memory without a number", {"model": DEMO, "gpu": {"memory": "GiB"}}),
    ("memory with a space", {"model": DEMO, "gpu": {"memory": "80 Gi"}}),
    ("memory below zero", {"model": DEMO, "gpu": {"memory": "-80Gi"}}),
    ("a claim in capitals", {"model": {"source": {"pvc": {"claimName": "Models"}}}}),
    ("a path out of the volume", {"model": {"source": {"pvc": {"claimName": "models", "path": "../etc"}}}}),
    ("a path out of the volume further in", {"model": {"source": {"pvc": {"claimName": "m", "path": "a/../../b"}}}}),
    ("an absolute path in a volume", {"model": {"source": {"pvc": {"claimName": "models", "path": "/models"}}}}),
    ("a relative path on a host", {"model": {"source": {"hostPath": {"path": "models"}}}}),
    ("a path up on a host", {"model": {"source": {"hostPath": {"path": "/models/../etc"}}}}),
    ("an image without a name", {"model": {"source": {"image": {"reference": ""}}}}),
    ("an image with a space", {"model": {"source": {"image": {"reference": "models qwen"}}}}),
    ("a repository without an owner", {"model": {"source": {HUB: {"repository": "Qwen3-VL-8B"}}}}),
    ("a revision that climbs", {"model": {"source": {HUB: {"repository": "a/b", "revision": "../x"}}}}),
    ("a hub that is a file", {"model": {"source": {HUB: {"repository": "a/b", "endpoint": "file:///etc"}}}}),
    ("a list of tolerations that never ends", {"model": DEMO, "podTemplate": {"tolerations": [{}] * 33}}),
    ("a label longer than labels are", {"model": DEMO, "podTemplate": {"labels": {"a": "x" * 64}}}),
    ("a peer that is text", {"model": DEMO, "networkPolicy": {"ingressFrom": ["everyone"]}}),
    ("links to nowhere", {"model": DEMO, "media": {"links": {}}}),
    ("links without a host", {"model": DEMO, "media": {"links": {"hosts": []}}}),
    ("a host that is a link", {"model": DEMO, "media": {"links": {"hosts": ["https://example.org"]}}}),
    ("a star within a host", {"model": DEMO, "media": {"links": {"hosts": ["cdn.*.org"]}}}),
    (
        "an address that is no network",
        {"model": DEMO, "media": {"links": {"hosts": ["*"], "privateNetworks": ["::1"]}}},
    ),
    ("a clip without an end", {"model": DEMO, "media": {"video": {"maxSeconds": 0}}}),
    ("a port out of range", {"model": DEMO, "service": {"port": 70000}}),
    ("a monitor that is neither on nor off", {"model": DEMO, "monitoring": {"podMonitor": "yes"}}),
]


@pytest.mark.parametrize("spec", [spec for _, spec in BAD], ids=[name for name, _ in BAD])
def test_a_bad_spec_is_refused_by_the_schema_and_by_the_models(spec: dict[str, Any]) -> None:
    assert faults(SPEC, spec) != []
    with pytest.raises(ValidationError):
        PrismDeploymentSpec.parse(spec)


@pytest.mark.parametrize("source", [{}, {"demo": {}, "pvc": {"claimName": "models"}}], ids=["none", "two"])
def test_a_model_without_exactly_one_source_is_refused_even_where_no_rule_was_installed(source: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="exactly one of"):
        PrismDeploymentSpec.parse({"model": {"source": source}})


def test_an_autoscaler_whose_least_is_above_its_most_is_refused_even_where_no_rule_was_installed() -> None:
    with pytest.raises(ValidationError, match="minReplicas must not be above"):
        PrismDeploymentSpec.parse({"model": DEMO, "autoscaling": {"minReplicas": 3, "maxReplicas": 2}})


@pytest.mark.parametrize("network", ["10.8.0.1/16", "10.8.0.0/33", "1.2.3/8", "::/129"])
def test_a_network_that_is_none_is_refused_by_the_models_where_the_schema_sees_none_of_it(network: str) -> None:
    spec = {"model": DEMO, "media": {"links": {"hosts": ["*"], "privateNetworks": [network]}}}
    assert faults(SPEC, spec) == []
    with pytest.raises(ValidationError, match="privateNetworks"):
        PrismDeploymentSpec.parse(spec)


@pytest.mark.parametrize("host", ["example.org", "*.example.org", "*", "store_1.media.svc", "192.0.2.1", "2001:db8::1"])
def test_every_host_that_the_engine_takes_can_be_said(host: str) -> None:
    spec = {"model": DEMO, "media": {"links": {"hosts": [host]}}}
    assert faults(SPEC, spec) == []
    assert settings_of(PrismDeploymentSpec.parse(spec)).fetch.hosts == (host,)


def test_what_kubernetes_checks_itself_passes_through_untouched() -> None:
    affinity = {"nodeAffinity": {"anything": [1, {"deep": None}]}}
    spec = PrismDeploymentSpec.parse({"model": DEMO, "podTemplate": {"affinity": affinity}})
    assert spec.pod_template.affinity == affinity


def test_a_status_goes_to_the_wire_and_back_and_fits_the_schema() -> None:
    status = PrismDeploymentStatus(
        observed_generation=3,
        serving_generation=2,
        planned_pages=1200,
        conditions=[
            Condition(
                type="Ready",
                status="False",
                observed_generation=3,
                last_transition_time="2026-01-31T10:00:00Z",
                reason="RollingOut",
                message="1 of 2 pods is of generation 3",
            )
        ],
    )
    wire = status.to_object()
    assert faults(STATUS, wire) == []
    assert "measuredPages" not in wire
    assert PrismDeploymentStatus.parse(wire) == status
    ready = status.condition("Ready")
    assert ready is not None
    assert ready.reason == "RollingOut"
    assert status.condition("Available") is None


def test_a_status_that_a_newer_operator_wrote_can_be_read() -> None:
    assert PrismDeploymentStatus.parse({"replicas": 2, "fieldOfTomorrow": 1}).replicas == 2
    assert PrismDeploymentStatus.parse(None) == PrismDeploymentStatus()
