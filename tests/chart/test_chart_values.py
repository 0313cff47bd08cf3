"""Every value is described, checked and used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from chart_support import CHART, Chart, HelmError, Object

VALUES: Object = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: Object = json.loads((CHART / "values.schema.json").read_text())

Path = tuple[str, ...]


def leaves(values: Any, schema: Object, at: Path = ()) -> Iterator[Path]:
    """Paths of the values that the schema does not take apart any further."""
    if not schema.get("properties"):
        yield at
        return
    for key, value in values.items():
        yield from leaves(value, schema["properties"][key], (*at, key))


def at(path: str, value: Any) -> Object:
    """{a: {b: value}} for `a.b`."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


DIGEST = "sha256:" + "ab" * 32
OTHER: dict[str, Any] = {
    "scope": "namespace",
    "crds.enabled": False,
    "image.registry": "registry.example.com",
    "image.tag": "2",
    "image.pullPolicy": "Always",
    "image.pullSecrets": [{"name": "pull"}],
    **{
        f"images.{image}.{key}": value
        for image in ("operator", "server", "serverCPU", "router")
        for key, value in (("repository", "other"), ("tag", "3"), ("digest", DIGEST))
    },
    "operator.class": "blue",
    "operator.replicas": 2,
    "operator.logLevel": "DEBUG",
    "operator.allowHostPath": True,
    "operator.maxConcurrentRollouts": 3,
    "operator.resyncSeconds": 1.5,
    "operator.livenessResyncs": 7,
    "operator.statusMinIntervalSeconds": 0.5,
    "operator.lease.durationSeconds": 20,
    "operator.lease.renewDeadlineSeconds": 11,
    "operator.lease.retrySeconds": 1,
    "operator.evictionRetrySeconds": 1,
    "operator.lostNodeGraceSeconds": 0,
    "operator.resources": {"limits": {"memory": "1Gi"}},
    "operator.nodeSelector": {"pool": "system"},
    "operator.tolerations": [{"operator": "Exists"}],
    "operator.affinity": {"nodeAffinity": {}},
    "operator.priorityClassName": "high",
    "operator.podLabels": {"team": "vision"},
    "operator.podAnnotations": {"note": "x"},
    "serviceAccount.create": False,
    "serviceAccount.name": "mine",
    "serviceAccount.annotations": {"note": "x"},
    "rbac.create": False,
    "rbac.aggregate": False,
    "networkPolicy.enabled": False,
    "networkPolicy.metricsFrom": [{"podSelector": {}}],
    "networkPolicy.apiServer.ports": [8443],
    "networkPolicy.apiServer.cidrs": ["10.0.0.1/32"],
    "metrics.monitor.enabled": True,
    "metrics.monitor.kind": "ServiceMonitor",
    "metrics.monitor.interval": "5s",
    "metrics.monitor.labels": {"release": "kps"},
    "metrics.dashboard.enabled": True,
    "metrics.dashboard.labels": {"folder": "x"},
    "metrics.dashboard.annotations": {"folder": "x"},
}
"""Another value for each: what is rendered must change."""
ONLY_IN_A_CLUSTER = {"crds.takeOwnership"}
"""Looks at the CRD that is there."""
FIRST: dict[str, Object] = {
    "serviceAccount.create": {"serviceAccount": {"name": "mine"}},
    "metrics.monitor": {"metrics": {"monitor": {"enabled": True}}},
    "metrics.dashboard": {"metrics": {"dashboard": {"enabled": True}}},
}
"""What must be set for a value, or for a group of them, to matter."""


def merged(one: Object, other: Object) -> Object:
    both = {key: one.get(key, other.get(key)) for key in one.keys() | other.keys()}
    for key in one.keys() & other.keys():
        if isinstance(one[key], dict) and isinstance(other[key], dict):
            both[key] = merged(one[key], other[key])
    return both


def test_every_value_has_a_case_here() -> None:
    assert {".".join(path) for path in leaves(VALUES, SCHEMA)} == OTHER.keys() | ONLY_IN_A_CLUSTER


@pytest.mark.parametrize("path", OTHER)
def test_every_value_is_used(chart: Chart, path: str) -> None:
    group = path.rpartition(".")[0]
    first = {} if path.endswith("enabled") else FIRST.get(path, FIRST.get(group, {}))
    before = chart.render(first)
    after = chart.render(merged(at(path, OTHER[path]), first))
    assert before != after


def objects_of(schema: Any) -> Iterator[Object]:
    if isinstance(schema, dict):
        if "properties" in schema:
            yield schema
        for part in schema.values():
            yield from objects_of(part)


def test_the_schema_knows_exactly_the_values_there_are() -> None:
    assert all(part["additionalProperties"] is False for part in objects_of(SCHEMA))

    def same_keys(values: Any, schema: Object) -> None:
        if isinstance(values, dict) and "properties" in schema:
            assert values.keys() == schema["properties"].keys() - {"global"}
            for key, value in values.items():
                same_keys(value, schema["properties"][key])

    same_keys(VALUES, SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("operators", {}),
        ("operator.resync", 5),
        ("operator.replicas", 3),
        ("operator.resyncSeconds", 0),
        ("operator.class", "Not A Name"),
        ("scope", "galaxy"),
        ("images.operator.digest", "sha256:short"),
        ("image.pullSecrets", ["pull"]),
        ("metrics.monitor.kind", "Probe"),
        ("networkPolicy.apiServer.ports", [0]),
    ],
)
def test_a_wrong_value_is_refused_by_name(chart: Chart, path: str, value: Any) -> None:
    with pytest.raises(HelmError, match=path.rpartition(".")[2]):
        chart.render(at(path, value))


def test_an_account_that_is_not_made_needs_a_name(chart: Chart) -> None:
    with pytest.raises(HelmError, match=r"serviceAccount\.name is needed"):
        chart.render({"serviceAccount": {"create": False}})
