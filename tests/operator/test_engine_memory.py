"""The memory that is asked for where the spec names none: all that is kept on the host, by the newest template."""

from __future__ import annotations

from typing import Any

import pytest
from deployments import DEMO, HUB, deployment, merged

from prism_operator.children.config import settings_of
from prism_operator.children.memory import CPU_POOL_BYTES, MOST_DEFAULT_WORKERS, engine_memory_bytes
from prism_operator.children.resources import engine_resources
from prism_operator.crd.quantity import quantity_bytes
from prism_operator.deployment import TEMPLATE_VERSIONS
from prism_server.capacity.models import KNOWN_MODELS
from prism_server.engine import device_build
from prism_server.media import pipeline

MIB = 1 << 20
GIB = 1 << 30


def asked(spec: dict[str, Any]) -> int:
    return engine_memory_bytes(deployment(spec).spec, TEMPLATE_VERSIONS[-1])


def more(change: dict[str, Any], base: dict[str, Any] = HUB) -> int:
    """What a change adds to the sum."""
    return asked(merged(base, change)) - asked(base)


@pytest.mark.parametrize(
    ("change", "num_bytes"),
    [
        ({"kv": {"hostMemory": "8Gi"}}, 8 * GIB),
        ({"media": {"cacheSize": "3Gi"}}, 2 * GIB),
        ({"engine": {"tensorParallel": 2}}, GIB),
        ({"media": {"links": {"hosts": ["*"], "cacheSize": "1Gi"}}}, (1024 + 128) * MIB),
        ({"media": {"links": {"hosts": ["*"], "maxRequestSize": "512Mi"}}}, (256 + 512) * MIB),
        ({"engine": {"overrides": {"fetch": {"hosts": ["*"]}}}}, (256 + 128) * MIB),
        ({"engine": {"overrides": {"fetch": {"cache_bytes": 9 * GIB}}}}, 0),
        ({"engine": {"overrides": {"http": {"max_body_bytes": 256 * MIB}}}}, 256 * MIB),
        ({"media": {"maxItemSize": "128Mi"}}, 256 * MIB),
        ({"engine": {"overrides": {"engine": {"feature_cache_bytes": 9 * GIB}}}}, 0),
    ],
)
def test_what_is_kept_on_the_host_is_asked_for(change: dict[str, Any], num_bytes: int) -> None:
    assert more(change) == num_bytes


def test_every_decoding_thread_has_room_for_a_frame_and_for_the_patches_of_the_largest_item() -> None:
    by_one = more({"engine": {"overrides": {"media": {"workers": 9}}}})
    assert by_one > 256 * MIB
    assert more({"engine": {"overrides": {"media": {"workers": 16}}}}) == 8 * by_one
    patch_bytes = KNOWN_MODELS["8b"].vision.patch_values
    assert more({"media": {"video": {"maxTokens": 12_288 + 1024}}}) == 8 * 1024 * 4 * patch_bytes
    assert more({"media": {"maxImageTokens": 8192}}) == 0


def test_without_a_card_its_pools_and_the_weights_are_on_the_host() -> None:
    settings = settings_of(deployment(DEMO).spec)
    weights = KNOWN_MODELS["demo"].weight_bytes("fp32")
    with_a_card = asked(merged(DEMO, {"engine": {"device": "cuda"}}))
    assert asked(DEMO) - with_a_card == CPU_POOL_BYTES + settings.engine.feature_cache_bytes + weights
    page = KNOWN_MODELS["demo"].page_layout().page_bytes
    assert more({"kv": {"pages": 512}}, DEMO) == 512 * page - CPU_POOL_BYTES


def test_the_sum_counts_with_the_engines_own_figures() -> None:
    assert device_build.CPU_POOL_BYTES == CPU_POOL_BYTES
    assert pipeline.MOST_DEFAULT_WORKERS == MOST_DEFAULT_WORKERS
    assert {(shape.vision.patch_values, shape.vision.patches_per_token) for shape in KNOWN_MODELS.values()} == {
        (1536, 4)
    }


@pytest.mark.parametrize("part", ["requests", "limits"])
def test_memory_that_the_spec_names_stands(part: str) -> None:
    spec = merged(HUB, {"podTemplate": {"resources": {part: {"memory": "3Gi"}}}})
    resources = engine_resources(deployment(spec).spec, TEMPLATE_VERSIONS[-1])
    said = {quantity_bytes(resources[each]["memory"]) for each in resources if "memory" in resources[each]}
    assert said == {3 * GIB}
