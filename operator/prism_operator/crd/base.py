"""Building blocks of the API: camelCase on the wire, unknown fields refused, bounded strings and lists, CEL rules."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, GetJsonSchemaHandler
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

GROUP = "prism-infer.io"
VERSION = "v1alpha1"
KIND = "PrismDeployment"
PLURAL = "prismdeployments"
DEFAULT_CLASS = "prism"
"""`spec.operatorClass` where it is not said."""


class Model(BaseModel):
    """Base of every part.

    `cel` are the part's validation rules as (rule, message). A part that is `{}` by default has none: the API server
    would try them on that very `{}`, before the fields have their defaults.

    Strict, as the API server is: no number is read out of a string and no switch out of a number.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, alias_generator=to_camel, populate_by_name=True)
    cel: ClassVar[tuple[tuple[str, str], ...]] = ()

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        schema = handler(core_schema)
        if cls.cel:
            rules = [{"rule": rule, "message": message} for rule, message in cls.cel]
            handler.resolve_ref_schema(schema)["x-kubernetes-validations"] = rules
        return schema


def _no_switch(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "Input should be a valid integer")
    return value


NO_SWITCH = BeforeValidator(_no_switch)
"""For a choice of numbers: in Python `True` is one of `Literal[1, 2]`, whatever the model says of strictness."""

# Patterns are read by pydantic (Rust) here and by the API server (RE2) there: \w, \d and \s differ between them, and
# neither looks ahead. So only explicit character sets are used.
_SEGMENT = r"\.?[^/.][^/]*"
"""One name of a path; never `.` or `..`."""

Name = Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
"""A DNS subdomain name of a Kubernetes object (RFC 1123)."""
OptionalName = Annotated[str, Field(max_length=253, pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")]
"""A `Name`, or empty."""
Quantity = Annotated[str, Field(min_length=1, max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?(k|M|G|T|Ki|Mi|Gi|Ti)?$")]
"""Bytes as Kubernetes writes them: `512Mi`, `80Gi`, `141G`. `quantity_bytes` reads every one of them."""
RelativePath = Annotated[str, Field(max_length=512, pattern=rf"^({_SEGMENT}(/{_SEGMENT})*)?$")]
AbsolutePath = Annotated[str, Field(min_length=2, max_length=512, pattern=rf"^(/{_SEGMENT})+$")]
ImageReference = Annotated[str, Field(max_length=512, pattern=r"^[!-~]*$")]
Labels = Annotated[dict[str, Annotated[str, Field(max_length=63)]], Field(max_length=32)]
Annotations = Annotated[dict[str, Annotated[str, Field(max_length=16384)]], Field(max_length=32)]
Open = Annotated[dict[str, Any], Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})]
"""A Kubernetes type that is passed through as it is and checked by the API server where it is used."""
