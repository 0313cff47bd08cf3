"""The CustomResourceDefinition, made from the pydantic models: structural OpenAPI v3 as the API server wants it.

Structural means (Kubernetes, "Custom resources: specifying a structural schema"): every node has a type, nothing is a
reference, `additionalProperties` and `properties` exclude each other, and what may be absent is simply not required.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from prism_operator.crd.base import GROUP, KIND, PLURAL, VERSION
from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.crd.status import PrismDeploymentStatus

Schema = dict[str, Any]

SINGULAR = "prismdeployment"
SHORT_NAME = "pd"

_PASSED_THROUGH = (
    "type",
    "description",
    "enum",
    "format",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "maxProperties",
    "required",
    "x-kubernetes-validations",
    "x-kubernetes-preserve-unknown-fields",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
)


def model_schema(model: type[BaseModel]) -> Schema:
    """The structural schema of a model. Raises ValueError for what no structural schema can say."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _structural(schema, schema.get("$defs", {}))


def _structural(node: Schema, definitions: dict[str, Schema]) -> Schema:
    node = _resolved(node, definitions)
    if "type" not in node:
        raise ValueError(f"a structural schema has a type in every node, this one has not: {node}")
    unknown = (
        node.keys()
        - set(_PASSED_THROUGH)
        - {"properties", "additionalProperties", "items", "default", "title", "$defs"}
    )
    if unknown:
        raise ValueError(f"{sorted(unknown)} cannot be said in a structural schema: {node}")
    out = {key: node[key] for key in _PASSED_THROUGH if key in node}
    if "description" in out:
        out["description"] = " ".join(out["description"].split())
    if "properties" in node:
        out["properties"] = {name: _structural(child, definitions) for name, child in node["properties"].items()}
    elif isinstance(values := node.get("additionalProperties"), dict):
        out["additionalProperties"] = _structural(values, definitions)
    if "items" in node:
        out["items"] = _structural(node["items"], definitions)
    if node.get("default") is not None:
        # The API server fills a defaulted object with the defaults of its fields, so {} says it all.
        out["default"] = {} if "properties" in node else node["default"]
    return out


def _resolved(node: Schema, definitions: dict[str, Schema]) -> Schema:
    """Without reference and without `or null`; what stands beside either wins over what it leads to."""
    beside = dict(node)
    if "anyOf" in node:
        alternatives = [alternative for alternative in beside.pop("anyOf") if alternative != {"type": "null"}]
        if len(alternatives) != 1:
            raise ValueError(f"a structural schema knows no alternatives: {node}")
        return _resolved(alternatives[0] | beside, definitions)
    if "$ref" in node:
        name = beside.pop("$ref").rpartition("/")[2]
        return _resolved(definitions[name] | beside, definitions)
    return beside


def _condition_column(condition: str) -> Schema:
    path = f'.status.conditions[?(@.type=="{condition}")]'
    return {"name": condition, "type": "string", "jsonPath": f"{path}.status"}


def _print_columns() -> list[Schema]:
    """What `kubectl get pd` shows; priority 1 needs `-o wide`."""
    status, integer, string = ".status.", "integer", "string"
    return [
        _condition_column("Available"),
        _condition_column("Ready"),
        {"name": "Replicas", "type": integer, "jsonPath": f"{status}replicas"},
        {"name": "Pages", "type": integer, "jsonPath": f"{status}measuredPages", "description": "KV pages of a pod"},
        {"name": "Tokens", "type": integer, "jsonPath": f"{status}measuredTokens", "description": "in these pages"},
        {"name": "Model", "type": string, "jsonPath": f"{status}model"},
        {"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"},
        {"name": "Serving", "type": integer, "jsonPath": f"{status}readyReplicas", "priority": 1},
        {"name": "Updated", "type": integer, "jsonPath": f"{status}updatedReplicas", "priority": 1},
        {"name": "Routers", "type": integer, "jsonPath": f"{status}readyRouters", "priority": 1},
        {"name": "Planned", "type": integer, "jsonPath": f"{status}plannedPages", "priority": 1},
        {"name": "URL", "type": string, "jsonPath": f"{status}url", "priority": 1},
        {
            "name": "Reason",
            "type": string,
            "jsonPath": '.status.conditions[?(@.type=="Ready")].reason',
            "priority": 1,
        },
    ]


def _resource_schema() -> Schema:
    return {
        "type": "object",
        "description": "A Qwen3-VL model that is served by a set of engine pods.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": model_schema(PrismDeploymentSpec),
            "status": model_schema(PrismDeploymentStatus),
        },
    }


def crd() -> dict[str, Any]:
    """The apiextensions.k8s.io/v1 object, ready to be applied."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": KIND,
                "listKind": f"{KIND}List",
                "plural": PLURAL,
                "singular": SINGULAR,
                "shortNames": [SHORT_NAME],
                "categories": ["prism"],
            },
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": _resource_schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": _print_columns(),
                }
            ],
        },
    }


def missing_fields(installed: dict[str, Any]) -> list[str]:
    """Fields that this operator knows and an installed CRD does not, such as `spec.kv.minTokens`.

    The API server drops them silently from what people apply, so an operator names them when it starts. A version
    that is not served at all lacks everything: `["spec", "status"]`.
    """
    versions = installed["spec"]["versions"]
    served = next((version for version in versions if version["name"] == VERSION and version["served"]), None)
    theirs = served["schema"]["openAPIV3Schema"] if served else {}
    ours = _resource_schema()
    parts = {"properties": {part: ours["properties"][part] for part in ("spec", "status")}}
    return _missing(parts, theirs, prefix="")


def _missing(ours: Schema, theirs: Schema, prefix: str) -> list[str]:
    if theirs.get("x-kubernetes-preserve-unknown-fields"):
        return []
    missing = []
    for name, child in ours.get("properties", {}).items():
        path = f"{prefix}{name}"
        if name not in theirs.get("properties", {}):
            missing.append(path)
            continue
        installed = theirs["properties"][name]
        missing += _missing(child, installed, f"{path}.")
        missing += _missing(child.get("items", {}), installed.get("items", {}), f"{path}[].")
    return missing
