"""The real applications while there is no engine yet: alive, honest about not being ready, guarded."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from prism_server.engine.messages import TokenLogprob
from prism_server.http.byte_budget import ByteBudget
from prism_server.http.logs import REQUEST_ID
from prism_server.serving.answers import Collected, Sample
from prism_server.serving.app import admin_app, api_app
from prism_server.serving.body import Body
from prism_server.serving.exchange import FEW_LOGPROBS, Exchange
from prism_server.serving.services import Services
from prism_server.settings import EngineSettings, HTTPSettings, ServerLogSettings, ServerSettings

CHAT = {"messages": [{"role": "user", "content": "hi"}]}


def services(**http: Any) -> Services:
    return Services.from_settings(ServerSettings(http=HTTPSettings(**http)))


def call(app: Any, method: str, path: str, **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def test_it_is_alive_and_says_how_far_it_is_but_is_not_ready() -> None:
    house = services()
    house.lifecycle.progress("weights", 5, 20)
    app = api_app(house)
    assert call(app, "GET", "/livez").status_code == 200
    assert call(app, "GET", "/version").json()["name"] == "prism"
    startup, ready = call(app, "GET", "/startupz"), call(app, "GET", "/readyz")
    assert (startup.status_code, ready.status_code) == (503, 503)
    assert (startup.json()["stage"], startup.json()["done"], startup.json()["total"]) == ("weights", 5, 20)
    assert "loaded" in ready.json()["reason"]


@pytest.mark.parametrize("phase", ["loading", "draining", "faulted"])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/generate"])
def test_a_request_gets_503_with_retry_after(path: str, phase: str) -> None:
    house = services()
    if phase == "draining":
        house.lifecycle.drain()
    elif phase == "faulted":
        house.lifecycle.fault("the engine broke")
    answer = call(api_app(house), "POST", path, json=CHAT)
    assert answer.status_code == 503
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == phase
    assert house.lifecycle.inside == 0


def test_requests_beyond_the_limit_get_429_with_retry_after() -> None:
    engine = EngineSettings(max_running_sequences=1, max_waiting_requests=1)
    house = Services.from_settings(ServerSettings(engine=engine))
    house.lifecycle.ready()
    with house.lifecycle.request(), house.lifecycle.request():
        answer = call(api_app(house), "POST", "/v1/chat/completions", json=CHAT)
    assert answer.status_code == 429
    assert int(answer.headers["retry-after"]) >= 1


def test_paths_and_methods_that_are_not_there_are_json_errors() -> None:
    app = api_app(services())
    for method, path, status in (("GET", "/nowhere", 404), ("GET", "/v1/generate", 405)):
        answer = call(app, method, path)
        assert (answer.status_code, set(answer.json()["error"])) == (status, {"message", "type", "param", "code"})


def test_every_answer_has_a_request_id_and_a_given_one_is_repeated() -> None:
    app = api_app(services())
    given = call(app, "POST", "/v1/generate", json=CHAT, headers={"x-request-id": "mine-1"})
    assert given.headers["x-request-id"] == "mine-1"
    made = {call(app, "GET", "/livez").headers["x-request-id"] for _ in range(3)}
    assert len(made) == 3
    assert call(app, "GET", "/livez", headers={"x-request-id": "x" * 1000}).headers["x-request-id"] != "x" * 1000


@pytest.fixture
def keys(tmp_path: Path) -> Callable[[str], Path]:
    def write(content: str) -> Path:
        path = tmp_path / content
        path.write_text(content)
        return path

    return write


def test_api_keys_guard_v1_and_nothing_else(keys: Callable[[str], Path]) -> None:
    house = services(api_keys_file=keys("secret"))
    app = api_app(house)
    assert call(app, "GET", "/livez").status_code == 200
    for path in ("/v1/models", "/v1/chat/completions", "/v1/nowhere"):
        refused = call(app, "GET", path)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"] == "Bearer"
        assert refused.json()["error"]["code"] == "missing_api_key"
    assert call(app, "GET", "/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert call(app, "GET", "/v1/models", headers={"authorization": "Bearer secret"}).status_code == 503


def test_the_admin_token_guards_internal_and_leaves_metrics_open(keys: Callable[[str], Path]) -> None:
    drained: list[str] = []
    app = admin_app(services(admin_token_file=keys("token")), lambda: drained.append("drain"))
    assert call(app, "GET", "/metrics").status_code == 200
    assert call(app, "GET", "/livez").status_code == 200
    for method, path in (("GET", "capacity"), ("GET", "cache"), ("POST", "drain"), ("POST", "reset_cache")):
        assert call(app, method, f"/internal/{path}").status_code == 401
    assert not drained
    token = {"authorization": "Bearer token"}
    assert call(app, "GET", "/internal/capacity", headers=token).status_code == 503
    assert call(app, "POST", "/internal/drain", headers=token).status_code == 202
    assert drained == ["drain"]


@pytest.mark.parametrize("path", ["/internal/drain", "/internal/reset_cache"])
def test_without_a_token_the_server_is_changed_on_loopback_only(path: str) -> None:
    drained: list[str] = []

    def post(admin_host: str) -> httpx.Response:
        house = services(admin_host=admin_host)
        return call(admin_app(house, lambda: drained.append(admin_host)), "POST", path)

    for host in ("0.0.0.0", "::", "10.0.0.7", "engine.example"):
        refused = post(host)
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "admin_token_needed")
        assert "http.admin_token_file" in refused.json()["error"]["message"]
    assert drained == []
    assert {post(host).status_code for host in ("127.0.0.1", "::1", "localhost")} <= {202, 503}  # 503: still loading
    assert drained == (["127.0.0.1", "::1", "localhost"] if path.endswith("drain") else [])


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name.endswith("request_log")]


def test_each_request_under_v1_has_one_line_in_the_log_and_probes_have_none(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    app = api_app(services())
    call(app, "GET", "/livez")
    call(app, "POST", "/v1/generate", json=CHAT)
    call(app, "GET", "/v1/generate")
    loading, absent = logged(caplog)
    assert loading.startswith("POST /v1/generate 503 end=loading engine_id=- prompt_tokens=0 ")
    assert absent.startswith("GET /v1/generate 405 end=not_found ")


@pytest.mark.parametrize(
    ("path", "shown"),
    [
        ("/v1/a%0a2026-01-01 ERROR forged", "/v1/a%0A2026-01-01%20ERROR%20forged"),
        ("/v1/%1b%5b31mred", "/v1/%1B%5B31mred"),
        ("/v1/models/org/na%C3%AFve:x%25", "/v1/models/org/na%C3%AFve:x%25"),
    ],
)
def test_a_path_cannot_end_its_line_in_the_log_nor_speak_to_a_terminal(
    path: str, shown: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    call(api_app(services()), "GET", path)
    [line] = logged(caplog)
    assert line.startswith(f"GET {shown} ")
    assert line.isascii()
    assert line.isprintable()


def test_a_refused_key_is_in_the_log_and_the_lines_can_be_turned_off(
    keys: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    call(api_app(services(api_keys_file=keys("secret"))), "GET", "/v1/models")
    [line] = logged(caplog)
    assert line.startswith("GET /v1/models 401 end=missing_api_key ")
    caplog.clear()
    silent = Services.from_settings(ServerSettings(log=ServerLogSettings(requests=False)))
    call(api_app(silent), "POST", "/v1/generate", json=CHAT)
    assert logged(caplog) == []


def test_work_in_a_thread_is_still_about_its_request() -> None:
    async def ask() -> str:
        REQUEST_ID.set("mine-2")
        exchange = Exchange(services(), None, Body(ByteBudget("the server", 0)), {}, None, None)  # type: ignore[arg-type]
        return await exchange.in_worker(REQUEST_ID.get)

    assert asyncio.run(ask()) == "mine-2"


@pytest.mark.parametrize(("num_tokens", "is_long"), [(1, False), (FEW_LOGPROBS, False), (FEW_LOGPROBS + 1, True)])
def test_an_answer_with_many_logprobs_is_written_out_in_a_worker(num_tokens: int, is_long: bool) -> None:
    """Half a million of them take seconds, in which other streams go on."""
    collected = Collected([Sample(logprobs=[TokenLogprob(1, -0.5)] * num_tokens)])
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def answer() -> None:
        exchange = Exchange(services(), None, Body(ByteBudget("the server", 0)), {"type": "http"}, None, send)  # type: ignore[arg-type]
        await exchange.send_whole(collected, lambda: threading.current_thread().name)

    asyncio.run(answer())
    assert (b"prism-prepare" in sent[-1]["body"]) == is_long


def test_refusals_and_unknown_fields_are_counted_under_a_bounded_set_of_labels() -> None:
    house = services()
    call(api_app(house), "POST", "/v1/generate", json=CHAT)
    house.metrics.unknown_fields(["user", "user", "b a d", *(f"field_{i}" for i in range(200))])
    text = house.metrics.expose().decode()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.name.split("_")[0] for sample in samples} == {"prism", "process"}
    counts = {tuple(sample.labels.values()): sample.value for sample in samples if sample.name.endswith("_total")}
    assert counts[("loading",)] == 1
    assert counts[("user",)] == 2
    fields = [sample for sample in samples if sample.name == "prism_unknown_request_fields_total"]
    assert len(fields) == 65
    assert sum(sample.value for sample in fields) == 203
