"""Further settings of a process that the spec passes through: merged into its configuration and checked with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from prism_operator.refused import Refused

Config = dict[str, dict[str, Any]]
"""By group and option, as the process reads its settings."""
Settings = TypeVar("Settings", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Overrides(Generic[Settings]):
    """What one kind of process may be told beyond the fields of the spec."""

    field: str
    """Where people write them: `engine.overrides`."""
    kind: type[Settings]
    spec_fields: Mapping[str, str]
    """Settings that have a field of their own in the spec. Overrides must not say them a second time: plan, probes and
    grace follow the spec."""
    fixed: frozenset[str]
    """Settings that ports, probes and policies of the pod depend on."""
    optional_fields: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Settings whose field of the spec may be absent. Overrides may say them where it is: that is how they were said
    before there were such fields."""

    def merged(self, config: Config, overrides: Mapping[str, Any]) -> Config:
        """`config` with the overrides. Raises Refused (`InvalidSettings`) for one that is not theirs to say."""
        merged = {group: dict(values) for group, values in config.items()}
        for group, values in overrides.items():
            if not isinstance(values, dict):
                raise Refused("InvalidSettings", f"{self.field}.{group} must be an object of options")
            into = merged.setdefault(group, {})
            for option, value in values.items():
                self._check_free(f"{group}.{option}", is_said=option in config.get(group, ()))
                into[option] = value
        return merged

    def checked(self, config: Config) -> Settings:
        """As the process will read it, without the paths of Secrets, which exist in the pod only.

        Raises Refused (`InvalidSettings`) for what it would not start with.
        """
        http = {key: value for key, value in config["http"].items() if not key.endswith("_file")}
        try:
            return self.kind.model_validate(config | {"http": http})
        except ValidationError as invalid:
            raise Refused("InvalidSettings", "; ".join(map(self._problem, invalid.errors()))) from None

    def _check_free(self, path: str, is_said: bool) -> None:
        field = self.spec_fields.get(path) or (self.optional_fields.get(path) if is_said else None)
        if field is not None:
            raise Refused("InvalidSettings", f"{self.field}.{path}: set spec.{field} instead")
        if path in self.fixed:
            raise Refused("InvalidSettings", f"{self.field}.{path}: the pod's ports and probes depend on it")

    def _problem(self, error: ErrorDetails) -> str:
        path = ".".join(map(str, error["loc"]))
        if error["type"] == "extra_forbidden":
            return f"{self.field}.{path}: no such option; there are {', '.join(self._options(error['loc'][:-1]))}"
        reason = error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
        return f"{self._where(path)}: {reason}"

    def _where(self, path: str) -> str:
        """A setting in the words of the spec. An optional field and an override of the same name are both named."""
        override = f"{self.field}.{path}" if path else self.field
        optional = self.optional_fields.get(path)
        return self.spec_fields.get(path) or (f"{optional} or {override}" if optional else override)

    def _options(self, group: tuple[int | str, ...]) -> list[str]:
        """Names on the level of an unknown one: groups, or the options of a group."""
        model: type[BaseModel] = self.kind
        for step in group:
            inner = model.model_fields[str(step)].annotation
            assert isinstance(inner, type)
            assert issubclass(inner, BaseModel)
            model = inner
        return list(model.model_fields)
