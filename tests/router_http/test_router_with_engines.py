"""Routers before real engines on the bundled model, asked by the openai client."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest
from router_http_support import (
    CHAT,
    KILL,
    STOP,
    TERM,
    Engine,
    RouterProcess,
    chat_body,
    eventually,
    held_port,
    picture,
    routing,
    sse_data,
)

Engines = tuple[Engine, Engine]


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def ask(url: str, *parts: Any, **fields: Any) -> Any:
    body = chat_body(*parts, **fields)
    return client_of(url).chat.completions.with_raw_response.create(model="demo", **body)


def holder_of(router: RouterProcess, body: dict[str, Any]) -> str | None:
    """The name of the pod that the request would be sent to because of what it holds."""
    decision = router.decision(body)
    return str(decision["name"]) if decision["cached_media"] else None


def held_at(router: RouterProcess, body: dict[str, Any]) -> dict[str, int]:
    """Media of the request whose KV the router expects, by pod."""
    return {candidate["name"]: candidate["cached_media"] for candidate in router.explain(body)["candidates"]}


def test_answers_through_the_router_are_the_engines_own(engines: Engines, router: RouterProcess) -> None:
    body = chat_body(picture(1), "What is it?", max_tokens=12)
    routed = router.post(body)
    engine = next(engine for engine in engines if engine.name == routed.headers["x-prism-pod"])
    direct = httpx.post(engine.api_url + CHAT, json=body, timeout=60).json()
    assert routed.json()["choices"] == direct["choices"]
    streamed = ask(router.api, picture(1), "What is it?", max_tokens=12, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in streamed.parse() if chunk.choices)
    assert (streamed.headers["x-prism-pod"], text) == (engine.name, direct["choices"][0]["message"]["content"])
    assert client_of(router.api).models.list().data[0].id == "demo"
    with pytest.raises(openai.BadRequestError) as refused:
        ask(router.api, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "What is it?")
    assert refused.value.param == "messages[0].content[0].image_url.url"


def test_a_picture_is_asked_about_where_it_is_and_hits_are_what_was_expected(router: RouterProcess) -> None:
    """Also with two KV types: what one engine holds is not expected at the other."""
    before = router.metrics()
    pictures = [picture(100 + i) for i in range(6)]
    homes = {}
    for i, part in enumerate(pictures):
        first = ask(router.api, part, "What is it?")
        homes[i] = first.headers["x-prism-pod"]
        assert first.headers["x-prism-cache"].startswith("home; media=0/1"), i
    eventually(lambda: all(holder_of(router, chat_body(part, "And now?")) for part in pictures))
    for i, part in enumerate(pictures):
        again = ask(router.api, part, "And now?")
        assert again.headers["x-prism-pod"] == homes[i]
        assert again.headers["x-prism-cache"].startswith("chain; media=1/1")
        answer = again.parse()
        assert answer.prism["encoded_items"] == 0
        assert f"reused_tokens={answer.usage.prompt_tokens_details.cached_tokens}" in again.headers["x-prism-cache"]
    after = router.metrics()
    assert after["expected_media_hits_total"] - before.get("expected_media_hits_total", 0) == 6
    assert after["reused_tokens_total"] > 0
    assert after["key_version_mismatches_total"] == 0
    eventually(router.is_idle)


def test_same_question_other_pictures_spreads_and_same_picture_other_questions_stays(router: RouterProcess) -> None:
    pods = {ask(router.api, picture(200 + i), "What is it?").headers["x-prism-pod"] for i in range(24)}
    assert len(pods) == 2
    homes = {ask(router.api, picture(200), f"Question {i}?").headers["x-prism-pod"] for i in range(4)}
    assert len(homes) == 1


def test_debug_placement_explains_the_decision_and_changes_nothing(router: RouterProcess) -> None:
    body = chat_body(picture(300), "What is it?", stream=True)
    first, again = router.explain(body), router.explain(body)
    assert first["decision"] == again["decision"]
    assert first["request"]["is_stream"]
    assert len(first["request"]["media"]) == 1
    assert {candidate["name"] for candidate in first["candidates"]} == {pod["name"] for pod in router.state()["pods"]}
    assert ask(router.api, picture(300), "What is it?").headers["x-prism-pod"] == first["decision"]["name"]
    assert router.metrics()["decisions_total{home}"] == 1


def test_a_router_younger_than_its_pods_knows_all_they_hold_within_two_polls(
    engines: Engines, router: RouterProcess
) -> None:
    body = chat_body(picture(400), "What is it?")
    router.post(body)
    eventually(lambda: holder_of(router, body) is not None)
    with routing(*[engine.backend for engine in engines]) as young:
        assert holder_of(young, body) == holder_of(router, body)
        assert young.metrics()["index_snapshots_total"] == 2


def test_three_routers_that_share_nothing_agree(engines: Engines) -> None:
    backends = [engine.backend for engine in engines]
    with ExitStack() as stack:
        routers = [stack.enter_context(routing(*order)) for order in (backends, backends[::-1], backends)]
        for seed in range(500, 510):
            body = chat_body(picture(seed), "What is it?")
            assert len({router.decision(body)["name"] for router in routers}) == 1
        shown = picture(520)
        asked = ask(routers[0].api, shown, "What is it?").headers["x-prism-pod"]
        eventually(lambda: all(holder_of(router, chat_body(shown, "And now?")) == asked for router in routers))
        assert {ask(router.api, shown, "And now?").headers["x-prism-pod"] for router in routers} == {asked}


def test_a_pod_whose_cache_was_reset_is_not_preferred_for_what_it_no_longer_holds(
    engines: Engines, router: RouterProcess
) -> None:
    body = chat_body(picture(600), "What is it?")
    httpx.post(engines[1].api_url + CHAT, json=body, timeout=60)
    eventually(lambda: holder_of(router, body) == engines[1].name)
    httpx.post(f"{engines[1].admin_url}/internal/reset_cache", timeout=60).raise_for_status()
    eventually(lambda: holder_of(router, body) is None)
    assert router.metrics()["index_epochs_lost_total"] == 1


def test_counters_return_to_zero_after_any_mix_of_clients_that_leave(engines: Engines, router: RouterProcess) -> None:
    def come_and_go(i: int) -> None:
        body = chat_body(picture(700 + i % 3), "Go on.", max_tokens=400, ignore_eos=True, stream=bool(i % 2))
        try:
            with httpx.stream("POST", router.api + CHAT, json=body, timeout=0.1 + i % 5 / 10) as answer:
                for _ in answer.iter_bytes():
                    if i % 3 == 0:
                        return
        except httpx.TimeoutException:
            pass

    threads = [threading.Thread(target=come_and_go, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    eventually(router.is_idle)
    eventually(lambda: all(engine.is_idle() for engine in engines))
    assert router.post(chat_body("Hello")).status_code == 200


# --- engines that die


@pytest.fixture
def ports() -> Iterator[tuple[int, int]]:
    """Of one engine after the other. Nobody else is given them between two."""
    with held_port() as api, held_port() as admin:
        yield api.getsockname()[1], admin.getsockname()[1]


def has_heard(engine: Engine) -> bool:
    """Whether it knows that it is to go, or has gone."""
    try:
        return httpx.get(f"{engine.admin_url}/readyz", timeout=60).status_code != 200
    except httpx.TransportError:
        return True


def warm(router: RouterProcess, engine: Engine, seed: int) -> dict[str, Any]:
    """A request that the router sends to `engine`, since its picture is there."""
    body = chat_body(picture(seed), "What is it?")
    httpx.post(engine.api_url + CHAT, json=body, timeout=60).raise_for_status()
    eventually(lambda: holder_of(router, body) == engine.name)
    return body


def test_a_pod_is_killed_and_another_comes_in_its_place(engines: Engines, ports: tuple[int, int]) -> None:
    """Mid-stream: an error event. Before the first byte: another pod answers. Then one more under the same address,
    which is not preferred for what the first one held, and is drained."""
    other = engines[0]
    with Engine(ports) as first, routing(other.backend, first.backend) as router:
        body = warm(router, first, 800)
        assert held_at(router, body) == {other.name: 0, first.name: 1}
        stream = body | {"stream": True, "max_tokens": 2000, "ignore_eos": True}
        with httpx.stream("POST", router.api + CHAT, json=stream, timeout=60) as answer:
            pieces = []
            for piece in answer.iter_text():
                pieces.append(piece)
                if len(pieces) == 3:
                    first.kill()
        *tokens, error, done = sse_data("".join(pieces))
        assert len(tokens) > 2
        assert (error["error"]["code"], done) == ("upstream_failed", "[DONE]")
        assert ask(router.api, picture(800), "What is it?").headers["x-prism-pod"] == other.name
        eventually(lambda: router.has_met(1))

        with Engine(ports) as second:
            eventually(lambda: router.state()["stats"]["accepting_pods_now"] == 2)
            assert held_at(router, body) == {other.name: 1, second.name: 0}  # the other has computed it since
            _killed_before_its_first_byte(router, second, other)
            eventually(lambda: router.has_met(1))

        with Engine(ports) as third:
            eventually(lambda: router.state()["stats"]["accepting_pods_now"] == 2)
            _drained(router, third, other)
        eventually(router.is_idle)


def _killed_before_its_first_byte(router: RouterProcess, engine: Engine, other: Engine) -> None:
    def kill() -> None:
        eventually(lambda: router.pod(engine.name)["in_flight"] == 1)
        for _ in range(10):  # turns of the router's loop: it connects and sends meanwhile
            router.state()
        engine.signal(KILL)

    body = warm(router, engine, 810)
    engine.signal(STOP)  # takes requests, answers none
    killing = threading.Thread(target=kill)
    killing.start()
    answer = router.post(body)
    killing.join()
    assert (answer.status_code, answer.headers["x-prism-pod"]) == (200, other.name)
    assert router.metrics()["retries_total{broken}"] >= 1


def _drained(router: RouterProcess, engine: Engine, other: Engine) -> None:
    """Its stream goes on to the end; nothing new comes to it, not even what it holds."""
    body = warm(router, engine, 820)
    stream = body | {"stream": True, "max_tokens": 200, "ignore_eos": True}
    with httpx.stream("POST", router.api + CHAT, json=stream, timeout=60) as answer:
        assert answer.headers["x-prism-pod"] == engine.name
        pieces = []
        for piece in answer.iter_text():
            pieces.append(piece)
            if len(pieces) == 2:
                engine.signal(TERM)
                eventually(lambda: has_heard(engine))
                assert router.post(body | {"max_tokens": 1}).headers["x-prism-pod"] == other.name
    *_, last, done = sse_data("".join(pieces))
    assert last["choices"][0]["finish_reason"] == "length"
    assert done == "[DONE]"
