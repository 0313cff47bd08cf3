"""`status` of a PrismDeployment: what changes on events, never live rates."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from prism_operator.crd.base import Model

Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
"""JSON numbers are exact up to 2^53."""

ConditionStatus = Literal["True", "False", "Unknown"]
ConditionType = Literal[
    "Available",
    "Ready",
    "Progressing",
    "Stalled",
    "KVPlanned",
    "KVPlanMatched",
    "RouterReady",
    "ModelReady",
    "AuthReady",
    "AutoscalingReady",
    "InferencePoolReady",
    "ChildConflict",
    "SettingsUnchecked",
    "TensorParallelUnavailable",
]
"""The conditions that this operator may write. The schema takes any name: other versions may know others."""


class StatusModel(Model):
    """Base of the parts of a status, which an operator of another version may have written: unknown fields pass."""

    model_config = ConfigDict(extra="ignore")


class Condition(StatusModel):
    """One aspect of the state, as every Kubernetes condition is built."""

    type: Annotated[str, Field(min_length=1, max_length=316)] = Field(description="the aspect")
    status: ConditionStatus = Field(description="whether it holds")
    observed_generation: Count = Field(default=0, description="generation of the spec that this was said about")
    last_transition_time: Annotated[str, Field(max_length=64, json_schema_extra={"format": "date-time"})] = Field(
        description="when `status` changed last"
    )
    reason: Annotated[
        str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ] = Field(description="one word for programs")
    message: Annotated[str, Field(max_length=32768)] = Field(default="", description="a sentence for people")


class PlannedRange(StatusModel):
    """Pages that the eligible cards hold, where they differ."""

    min_pages: Count = Field(description="on the smallest card that fits")
    max_pages: Count = Field(description="on the largest")


class PrismDeploymentStatus(StatusModel):
    """What the operator saw last. Absent fields are not known (yet)."""

    observed_generation: Count | None = Field(
        default=None, description="generation of the spec that this status is about"
    )
    serving_generation: Count | None = Field(
        default=None, description="generation that the pods were last set to; behind it while a new spec cannot be used"
    )
    template_version: Count | None = Field(default=None, description="version of the pod template")
    model: Annotated[str, Field(max_length=253)] | None = Field(
        default=None, description="name of the model in /v1/models"
    )
    replicas: Count | None = Field(default=None, description="engine pods")
    ready_replicas: Count | None = Field(default=None, description="engine pods that serve, of any revision")
    updated_replicas: Count | None = Field(default=None, description="engine pods of the newest revision")
    ready_routers: Count | None = Field(default=None, description="router pods that are ready")
    selector: Annotated[str, Field(max_length=1024)] | None = Field(
        default=None, description="label selector of the engine pods, for the scale subresource"
    )
    planned_pages: Count | None = Field(default=None, description="KV pages of one engine pod, by plan")
    planned_tokens: Count | None = Field(default=None, description="tokens in these pages")
    planned_range: PlannedRange | None = None
    measured_pages: Count | None = Field(
        default=None, description="KV pages of one engine pod: the least of those that serve"
    )
    measured_tokens: Count | None = Field(default=None, description="tokens in these pages")
    url: Annotated[str, Field(max_length=512)] | None = Field(
        default=None, description="where it answers inside the cluster"
    )
    conditions: Annotated[
        list[Condition],
        Field(
            max_length=32, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
        ),
    ] = Field(default_factory=list, description="each aspect once, by type")

    @classmethod
    def parse(cls, status: dict[str, Any] | None) -> PrismDeploymentStatus:
        """From the wire; None for an object that has no status yet."""
        return cls.model_validate(status or {})

    def condition(self, type_: str) -> Condition | None:
        """The condition of this type, if it was ever said."""
        return next((condition for condition in self.conditions if condition.type == type_), None)

    def to_object(self) -> dict[str, Any]:
        """For the wire: camelCase, absent where nothing is known."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)
