"""What the API server does with a structural schema: walk it, check a value, fill in defaults."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

Schema = dict[str, Any]
PYTHON_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "boolean": bool,
}


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every node with its path, parents first."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key, suffix in (("additionalProperties", "{}"), ("items", "[]")):
        if key in schema:
            yield from nodes(schema[key], path + suffix)


def faults(schema: Schema, value: Any, path: str = "") -> list[str]:
    """What the API server would say against a value; unknown fields are a fault, as under strict field validation."""
    kind = schema["type"]
    if not isinstance(value, PYTHON_TYPES[kind]) or (kind == "integer" and isinstance(value, bool)):
        return [f"{path}: {value!r} is no {kind}"]
    found = [f"{path}: {value!r} against {rule}" for rule in _broken_rules(schema, value)]
    if kind == "array":
        for index, item in enumerate(value):
            found += faults(schema["items"], item, f"{path}[{index}]")
    if kind == "object":
        found += [f"{path}: {name} is required" for name in schema.get("required", ()) if name not in value]
        for name, child in value.items():
            child_schema = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if child_schema is not None:
                found += faults(child_schema, child, f"{path}.{name}")
            elif not schema.get("x-kubernetes-preserve-unknown-fields"):
                found.append(f"{path}.{name}: unknown field")
    return found


def _broken_rules(schema: Schema, value: Any) -> Iterator[str]:
    if "enum" in schema and value not in schema["enum"]:
        yield "enum"
    if isinstance(value, int):
        if value < schema.get("minimum", value):
            yield "minimum"
        if value > schema.get("maximum", value):
            yield "maximum"
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            yield "length"
        # RE2 searches, and its $ is the end of the text alone, which Python spells \Z.
        if "pattern" in schema and not re.search(schema["pattern"].replace("$", r"\Z"), value):
            yield "pattern"
    if isinstance(value, list) and not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        yield "items"
    if isinstance(value, dict) and len(value) > schema.get("maxProperties", len(value)):
        yield "maxProperties"


def with_defaults(schema: Schema, value: Any) -> Any:
    """The value as it is stored."""
    if isinstance(value, list):
        return [with_defaults(schema["items"], item) for item in value]
    if not isinstance(value, dict):
        return value
    filled = dict(value)
    for name, child in schema.get("properties", {}).items():
        if name not in filled and "default" in child:
            filled[name] = copy.deepcopy(child["default"])
        if name in filled:
            filled[name] = with_defaults(child, filled[name])
    return filled
