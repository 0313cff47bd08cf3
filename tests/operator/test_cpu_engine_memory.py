"""Without a card the FP8 copy of the LM head is on the host, and asked for from template version 3 on."""

from __future__ import annotations

from typing import Any

import pytest
from deployments import DEMO, HUB, deployment, merged

from prism_operator.children.memory import engine_memory_bytes
from prism_server.capacity.models import KNOWN_MODELS

ON_CPU = {"engine": {"device": "cpu"}}


def head(switch: object, spec: dict[str, Any], version: int = 3) -> int:
    """What `model.fp8_head` adds to the memory that is asked for."""
    switched = merged(spec, {"engine": {"overrides": {"model": {"fp8_head": switch}}}})
    without, with_it = (engine_memory_bytes(deployment(each).spec, version) for each in (spec, switched))
    return with_it - without


@pytest.mark.parametrize("switch", [True, "on"])
@pytest.mark.parametrize(("spec", "model"), [(DEMO, "demo"), (merged(HUB, ON_CPU), "8b")])
def test_the_heads_copy_is_asked_for_where_the_spec_turns_it_on(
    switch: object, spec: dict[str, Any], model: str
) -> None:
    assert head(switch, spec) == KNOWN_MODELS[model].fp8_head_bytes()


@pytest.mark.parametrize("switch", [False, "off", "auto"])
def test_on_a_cpu_there_is_no_copy_unless_it_is_asked_for(switch: object) -> None:
    assert head(switch, DEMO) == 0


def test_with_a_card_the_copy_is_there() -> None:
    assert head(True, HUB) == 0


def test_the_copy_of_a_model_whose_shape_is_not_known_is_left_out_as_its_weights_are() -> None:
    unknown = merged(ON_CPU, {"model": {"source": {"pvc": {"claimName": "models", "path": "mine"}}}})
    assert head(True, unknown) == 0


def test_the_template_before_asks_for_what_it_always_did() -> None:
    assert head(True, DEMO, version=2) == 0
