"""What routers and the operator read: capacity, the cache's journal, resets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serving_support import ServerProcess, image_part, noise, serving

from prism_server.engine.messages import EngineStats
from prism_server.identity import (
    KEY_VERSION,
    MediaPart,
    TextPart,
    cache_seed,
    content_id,
    media_chain_keys,
)
from prism_server.router.cache_answer import parse_cache
from prism_server.serving.admin import _costs
from prism_server.serving.metrics import ENGINE_COUNTERS, Metrics


@pytest.fixture(scope="module")
def own_server() -> Iterator[ServerProcess]:
    with serving() as server:
        yield server


def poll(server: ServerProcess, last: dict[str, Any] | None = None) -> dict[str, Any]:
    query = {} if last is None else {"epoch": last["epoch"], "cursor": last["cursor"]}
    return server.http.get(f"{server.admin}/internal/cache", params=query).json()


def test_capacity_says_whose_keys_these_are_and_what_there_is(own_server: ServerProcess) -> None:
    capacity = own_server.capacity()
    assert capacity["key_version"] == KEY_VERSION
    assert len(bytes.fromhex(capacity["namespace"])) == 32
    assert capacity["total_pages"] * capacity["page_tokens"] * capacity["bytes_per_token"] <= 24 << 20
    assert capacity["phase"] == "ready"
    assert capacity["epoch"] == poll(own_server)["epoch"]


def test_the_journal_names_the_media_chains_that_a_router_would_compute(own_server: ServerProcess) -> None:
    before = poll(own_server)
    assert before["snapshot"]
    pictures = [noise(900 + i) for i in range(3)]
    assert own_server.chat(*map(image_part, pictures), "What is it?", max_tokens=2).status_code == 200
    news = poll(own_server, before)
    assert not news["snapshot"]
    parts = [MediaPart("user", "image", content_id("image", picture)) for picture in pictures]
    seed = cache_seed(bytes.fromhex(news["namespace"]), None)
    expected = media_chain_keys(seed, [*parts, TextPart("user", "What is it?")])
    assert set(news["chains_added"]) == {key.hex() for key in expected}
    assert set(news["features_added"]) == {content_id("image", picture).hex() for picture in pictures}
    assert poll(own_server, news)["chains_added"] == []
    assert set(news["chains_added"]) <= set(poll(own_server)["chains_added"])


def test_a_reset_begins_a_new_epoch_and_forgets_the_cache(own_server: ServerProcess) -> None:
    picture = image_part(noise(950))
    own_server.chat(picture, "What is it?", max_tokens=2)
    before = poll(own_server)
    reset = own_server.http.post(f"{own_server.admin}/internal/reset_cache")
    assert reset.status_code == 200
    after = poll(own_server, before)
    assert after["epoch"] == reset.json()["epoch"] != before["epoch"]
    assert after["snapshot"]
    assert after["chains_added"] == after["features_added"] == []
    again = own_server.chat(picture, "What is it?", max_tokens=2).json()
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert again["prism"]["encoded_items"] == 1


@pytest.mark.parametrize("cursor", ["far", "", "-1", "²", "9" * 5000])
def test_a_cursor_that_is_no_number_is_a_400(own_server: ServerProcess, cursor: str) -> None:
    answer = own_server.http.get(f"{own_server.admin}/internal/cache", params={"cursor": cursor})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "cursor")


def test_metrics_have_the_prism_names_and_move(own_server: ServerProcess) -> None:
    before = own_server.metrics()
    own_server.chat(image_part(noise(960)), "What is it?", max_tokens=6, ignore_eos=True, user="somebody")
    after = own_server.metrics()

    def moved(name: str) -> float:
        return after[name] - before.get(name, 0)

    assert moved("prism_generated_tokens_total") == 6
    assert moved("prism_time_to_first_token_seconds_count") == 1
    assert moved("prism_inter_token_latency_seconds_count") == 5
    assert moved("prism_time_per_output_token_seconds_count") == 1
    assert moved("prism_request_latency_seconds_count") == 1
    assert moved("prism_queue_time_seconds_count") == 1
    assert moved("prism_unknown_request_fields_total{user}") == 1
    assert moved("prism_prefix_query_tokens_total{vision}") == 9
    assert moved("prism_steps_total") >= 6
    assert after["prism_kv_pages"] == own_server.capacity()["total_pages"]
    assert after["prism_requests_running"] == 0
    assert 0 <= after["prism_kv_usage_ratio"] <= 1


def test_a_router_learns_what_a_token_and_a_patch_have_cost_on_a_gpu() -> None:
    measured = EngineStats(ms_per_token=0.03, ms_per_patch=0.004)
    assert _costs(measured, "cuda:0") == {"ms_per_token": 0.03, "ms_per_patch": 0.004}
    assert _costs(EngineStats(), "cuda:0") == {}
    assert _costs(measured, "cpu") == {}


def test_a_cpus_costs_are_not_told(own_server: ServerProcess) -> None:
    text = " ".join(map(str, range(400)))
    assert own_server.chat(image_part(noise(970)), text, max_tokens=4, ignore_eos=True).status_code == 200
    load = parse_cache(own_server.http.get(f"{own_server.admin}/internal/cache").content).load
    assert (load.ms_per_token, load.ms_per_patch) == (None, None)


def test_what_the_caches_drop_and_remember_is_counted_and_no_counter_has_two_names(own_server: ServerProcess) -> None:
    def counts() -> dict[str, float]:
        return {name: value for name, value in own_server.metrics().items() if name.endswith("_total")}

    own_server.chat("The same words again.", max_tokens=1)
    before = counts()
    own_server.chat("The same words again.", max_tokens=1)
    assert counts()["prism_text_memo_hits_total"] > before["prism_text_memo_hits_total"]
    named = {f"{name}_total" for name in (*ENGINE_COUNTERS, "steps")}
    assert {"evicted_pages_total", "feature_evictions_total", "text_memo_evictions_total"} < named
    assert {f"prism_{name}" for name in named} < set(before)
    engine = {name.removeprefix("prism_engine_") for name in before if name.startswith("prism_engine_")}
    assert "prefilled_tokens_total" in engine
    assert not engine & named
    assert before["process_cpu_seconds_total"] > 0


def test_a_time_falls_into_the_bucket_whose_bound_it_does_not_exceed() -> None:
    metrics = Metrics()
    for time_s in (0.001, 0.002, 0.0021, 99.0):
        metrics.itl.observe(time_s)
    text = metrics.expose().decode()
    for le, count in (("0.002", 2), ("0.005", 3), ("2.5", 3), ("+Inf", 4)):
        assert f'prism_inter_token_latency_seconds_bucket{{le="{le}"}} {count}.0' in text
    assert "prism_inter_token_latency_seconds_count 4.0" in text
    assert "prism_inter_token_latency_seconds_sum 99.0051" in text
