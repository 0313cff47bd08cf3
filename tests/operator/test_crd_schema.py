"""The CustomResourceDefinition is structural, bounded, explained, and says what the pydantic models say."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, Field, ValidationError
from structural_schema import PYTHON_TYPES, Schema, faults, nodes, with_defaults

from prism_operator.crd.__main__ import crd_yaml
from prism_operator.crd.quantity import quantity_bytes
from prism_operator.crd.schema import crd, missing_fields, model_schema
from prism_operator.crd.spec import PrismDeploymentSpec

ROOT = Path(__file__).parents[2]
VERSION = crd()["spec"]["versions"][0]
RESOURCE = VERSION["schema"]["openAPIV3Schema"]
SPEC = RESOURCE["properties"]["spec"]
STATUS = RESOURCE["properties"]["status"]
ALL_NODES = [*nodes(SPEC, "spec"), *nodes(STATUS, "status")]
HUB = "spec.model.source.huggingFace"
DEMO: dict[str, Any] = {"model": {"source": {"demo": {}}}}


def at(schema: Schema, path: str) -> Schema:
    for name in path.split("."):
        schema = schema["properties"][name]
    return schema


def test_every_node_has_a_type_and_nothing_that_a_structural_schema_cannot_say() -> None:
    for path, node in ALL_NODES:
        assert node["type"] in PYTHON_TYPES, path
        assert not node.keys() & {"$ref", "$defs", "anyOf", "allOf", "oneOf", "const", "title", "nullable"}, path
        assert not ("properties" in node and "additionalProperties" in node), path


def test_every_string_list_map_and_number_is_bounded_so_that_rules_stay_within_the_cost_budget() -> None:
    for path, node in ALL_NODES:
        match node["type"]:
            case "string":
                assert "maxLength" in node or "enum" in node, path
            case "array":
                assert "maxItems" in node, path
            case "integer":
                assert {"minimum", "maximum"} <= node.keys() or "enum" in node, path
            case "object":
                assert "properties" in node or "maxProperties" in node or is_open(node), path


def is_open(node: Schema) -> bool:
    return bool(node.get("x-kubernetes-preserve-unknown-fields"))


def test_every_field_explains_itself_to_kubectl_explain() -> None:
    unexplained = [path for path, node in ALL_NODES if not path.endswith(("{}", "[]")) and not node.get("description")]
    assert unexplained == []


def test_no_pattern_uses_what_the_two_regular_expression_engines_read_differently() -> None:
    for path, node in ALL_NODES:
        pattern = node.get("pattern", "^$")
        assert pattern.startswith("^"), path
        assert pattern.endswith("$"), path
        assert not any(escape in pattern for escape in (r"\w", r"\d", r"\s", "(?")), path


def test_defaults_satisfy_their_own_schema() -> None:
    for path, node in ALL_NODES:
        if "default" in node:
            assert faults(node, with_defaults(node, node["default"]), path) == []


def test_the_smallest_spec_is_stored_with_the_defaults_of_the_models() -> None:
    stored = with_defaults(SPEC, DEMO)
    assert faults(SPEC, stored) == []
    spec = PrismDeploymentSpec.parse(DEMO)
    assert PrismDeploymentSpec.parse(stored) == spec
    dumped = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert stored == without_empty_factories(dumped, SPEC)


def without_empty_factories(value: Any, schema: Schema) -> Any:
    """Empty maps and lists that the models make up and the schema leaves absent."""
    if not isinstance(value, dict):
        return value
    children = schema.get("properties", {})
    return {
        name: without_empty_factories(child, children[name])
        for name, child in value.items()
        if not (child in ({}, []) and "properties" not in children[name])
    }


@pytest.mark.parametrize(
    "path",
    [
        "engine.requestTimeoutSeconds",
        "engine.maxContextTokens",
        "drain.streamSeconds",
        "gpu.sharing",
        "media.maxItemSize",
        "operatorClass",
    ],
)
def test_fields_that_rules_read_are_there_in_every_stored_spec(path: str) -> None:
    value = with_defaults(SPEC, DEMO)
    for name in path.split("."):
        value = value[name]


def test_rules_have_messages_and_stand_where_they_are_meant_to() -> None:
    rules = {path: node["x-kubernetes-validations"] for path, node in ALL_NODES if "x-kubernetes-validations" in node}
    assert rules.keys() == {"spec", "spec.model.source", HUB, "spec.autoscaling", "spec.media.links"}
    for at_path in rules.values():
        for rule in at_path:
            assert rule.keys() == {"rule", "message"}
            assert rule["rule"].strip()
            assert len(rule["message"].split()) >= 3


@pytest.mark.parametrize(
    ("parent", "field"),
    [("spec", "operatorClass"), (HUB, "storage.storageClassName")],
    ids=["operatorClass", "storage"],
)
def test_an_immutable_field_is_guarded_on_its_parent_with_has_on_both_sides(parent: str, field: str) -> None:
    rules = [rule["rule"] for rule in dict(ALL_NODES)[parent]["x-kubernetes-validations"]]
    assert any(f"has(self.{field}) == has(oldSelf.{field})" in rule for rule in rules)
    assert any(f"self.{field} == oldSelf.{field}" in rule for rule in rules)


def test_no_rule_stands_on_a_defaulted_object_since_the_api_server_tries_it_on_the_bare_default() -> None:
    for path, node in ALL_NODES:
        assert not ("default" in node and "x-kubernetes-validations" in node), path


def test_a_source_that_appears_in_the_model_is_counted_by_the_rule() -> None:
    [rule] = at(SPEC, "model.source")["x-kubernetes-validations"]
    for name in at(SPEC, "model.source")["properties"]:
        assert f"has(self.{name})" in rule["rule"]
        assert name in rule["message"]


def test_conditions_are_a_map_by_type_so_that_two_writers_do_not_fight() -> None:
    conditions = STATUS["properties"]["conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]
    assert set(conditions["items"]["required"]) >= {"type", "status"}


def test_print_columns_and_scale_paths_lead_to_fields_of_the_schema() -> None:
    for column in VERSION["additionalPrinterColumns"]:
        path = column["jsonPath"].removeprefix(".")
        if path.startswith(("metadata.", "status.conditions[")):
            continue
        assert at(RESOURCE, path)["type"] == column["type"], column
    for path in VERSION["subresources"]["scale"].values():
        assert at(RESOURCE, path.removeprefix("."))
    first = [column["name"] for column in VERSION["additionalPrinterColumns"] if not column.get("priority")]
    assert first == ["Available", "Ready", "Replicas", "Pages", "Tokens", "Model", "Age"]


# What the schema takes, the models take, and the other way round.

GOOD_TEXT = {
    "": "x",
    "memory": "80Gi",
    "size": "1.5Ti",
    "hostMemory": "0",
    "maxItemSize": "64M",
    "cacheSize": "512Mi",
    "endpoint": "http://hub.local:8080",
    "repository": "Qwen/Qwen3-VL-8B-Instruct",
    "maxSize": "64Mi",
    "maxRequestSize": "128Mi",
    "hosts": "*.example.org",
    "privateNetworks": "fd00:8::/64",
}


@st.composite
def values(draw: st.DrawFn, schema: Schema, name: str = "") -> Any:
    """A value that the schema takes, most optional fields left out."""
    if "enum" in schema:
        return draw(st.sampled_from(schema["enum"]))
    match schema["type"]:
        case "boolean":
            return draw(st.booleans())
        case "integer":
            return draw(st.integers(schema["minimum"], schema["maximum"]))
        case "string":
            good = GOOD_TEXT.get(name) or ("/x" if schema.get("pattern", "").startswith("^(/") else "x")
            return draw(st.sampled_from([good, schema.get("default", good)]))
        case "array":
            least = schema.get("minItems", 0)
            return draw(st.lists(values(schema["items"], name), min_size=least, max_size=max(least, 2)))
    if is_open(schema):
        return draw(st.dictionaries(st.sampled_from(["a", "b"]), st.integers(), max_size=2))
    if "additionalProperties" in schema:
        return draw(st.dictionaries(st.sampled_from(["a", "b"]), values(schema["additionalProperties"]), max_size=2))
    required = schema.get("required", [])
    chosen = [child for child in schema["properties"] if child in required or draw(st.integers(0, 3)) == 0]
    return {child: draw(values(schema["properties"][child], child)) for child in chosen}


WRONG: tuple[Any, ...] = (
    *(0, -1, 1.5, 3, 2**40, True, "", "/", "..", "a/../b", "a b", "é", "x\n", "7", "٣Gi", "1Gi\n", "x" * 20_000),
    *([], ["UPPER"], ["x"] * 40, {}, {"nonsense": 1}, {f"k{i}": "v" for i in range(40)}),
)


@st.composite
def disturbed(draw: st.DrawFn) -> dict[str, Any]:
    """A spec with one place set to something that is wrong in most places."""
    spec = copy.deepcopy(draw(values(SPEC)))
    places = list(containers(spec))
    container, key = draw(st.sampled_from(places))
    container[key] = draw(st.sampled_from(WRONG))
    return spec


def containers(value: Any) -> list[tuple[Any, Any]]:
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in ((value, key), *containers(value[key]))]


def model_takes(spec: dict[str, Any]) -> bool:
    """By type and bound: what the models check across fields is CEL's part and left aside."""
    try:
        PrismDeploymentSpec.parse(spec)
    except ValidationError as error:
        return all(fault["type"] == "value_error" for fault in error.errors())
    return True


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(values(SPEC))
def test_what_the_schema_takes_the_models_take(spec: dict[str, Any]) -> None:
    assert faults(SPEC, spec) == []
    assert model_takes(spec)
    assert model_takes(with_defaults(SPEC, spec))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(disturbed())
def test_schema_and_models_agree_on_specs_with_one_fault(spec: dict[str, Any]) -> None:
    assert model_takes(spec) == (faults(SPEC, spec) == []), faults(SPEC, spec)


@given(st.from_regex(rf"(?a:{at(SPEC, 'kv.hostMemory')['pattern'].replace('$', '')})\Z"))
def test_every_quantity_that_the_schema_takes_can_be_read(text: str) -> None:
    assert quantity_bytes(text) >= 0


class Alternatives(BaseModel):
    field: int | str = Field(default=0, description="two types")


def test_a_model_that_no_structural_schema_can_say_is_an_error_when_the_schema_is_made() -> None:
    with pytest.raises(ValueError, match="no alternatives"):
        model_schema(Alternatives)


# The file in the chart, and clusters with an older one.


def test_the_charts_file_is_the_generated_schema() -> None:
    assert (ROOT / "charts/prism/files/crd.yaml").read_text(encoding="utf-8") == crd_yaml()


def test_the_module_prints_the_definition_without_torch_or_a_cluster() -> None:
    code = (
        "import runpy, sys; runpy.run_module('prism_operator.crd', run_name='__main__');"
        " assert not {'torch', 'kopf', 'kubernetes'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert yaml.safe_load(done.stdout) == crd()


def test_fields_that_an_older_installed_schema_lacks_are_named() -> None:
    installed = crd()
    assert missing_fields(installed) == []
    schema = installed["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    del at(schema, "spec.kv")["properties"]["minTokens"]
    del at(schema, "spec")["properties"]["monitoring"]
    del at(schema, "status.conditions")["items"]["properties"]["reason"]
    assert missing_fields(installed) == ["spec.kv.minTokens", "spec.monitoring", "status.conditions[].reason"]


def test_a_version_that_is_not_served_lacks_everything() -> None:
    installed = crd()
    installed["spec"]["versions"][0]["served"] = False
    assert missing_fields(installed) == ["spec", "status"]
