"""A request that pods fail at is taken for the cause before it has ended them all."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import openai
import pytest
from router_http_support import CHAT, RouterProcess, chat_body, eventually, held_port, questions, routing, sse_data
from scripted_pods import Asked, Script, engine_dies, hangs_up, never, refusal, says_yes, scripted, until

from prism_server.router.upstream import ConnectFailed, Origin, connect

POISON = "poison"


def at_poison(fails: Script) -> Script:
    """A pod that fails so at one request, and answers every other."""

    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await (fails if POISON.encode() in asked.body else says_yes)(asked, writer)

    return script


def ending_at(router: RouterProcess, name: str) -> dict[str, Any]:
    """A request that comes to the pod of that name after all others."""
    return next(body for body in questions() if router.explain(body)["candidates"][-1]["name"] == name)


@pytest.mark.parametrize("fails", [hangs_up, engine_dies])
def test_a_request_that_two_pods_fail_at_is_risked_at_no_third(fails: Script) -> None:
    script = at_poison(fails)
    with scripted(*[script] * 4) as pods, routing(*[pod.backend for pod in pods]) as router:
        answer = router.post(chat_body(POISON), headers={"x-request-id": "who-was-it"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "pods_failed")
        assert "retry-after" not in answer.headers
        assert sorted(len(pod.asked) for pod in pods) == [0, 0, 1, 1]
        counts = router.metrics()
        assert counts["suspects_total"] == 1
        assert sum(count for name, count in counts.items() if name.startswith("retries_total")) == 1
        assert "who-was-it" in router.log()
        assert router.post(chat_body("Hello")).status_code == 200
        eventually(router.is_idle)


def test_neither_is_one_that_pods_fall_silent_at() -> None:
    options = {"upstream.header_timeout_s": "1"}
    with scripted(*[never] * 3) as pods, routing(*[pod.backend for pod in pods], **options) as router:
        answer = router.post(chat_body(POISON))
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "pods_failed")
        assert sum(len(pod.asked) for pod in pods) == 2


def test_openais_client_does_not_send_such_a_request_again_by_itself() -> None:
    script = at_poison(hangs_up)
    with scripted(*[script] * 4) as pods, routing(*[pod.backend for pod in pods]) as router:
        client = openai.OpenAI(base_url=f"{router.api}/v1", api_key="none", max_retries=2)
        with pytest.raises(openai.InternalServerError) as refused:
            client.chat.completions.create(model="demo", messages=[{"role": "user", "content": POISON}])
        assert refused.value.code == "pods_failed"
        assert sum(len(pod.asked) for pod in pods) == 2


def test_one_pod_that_fails_costs_a_request_nothing_whoever_else_refuses_it() -> None:
    refusals = refusal(429, "full"), refusal(503, "loading")
    with scripted(hangs_up, *refusals, says_yes) as pods, routing(*[pod.backend for pod in pods]) as router:
        answer = router.post(ending_at(router, pods[3].name))
        assert (answer.status_code, answer.headers["x-prism-pod"]) == (200, pods[3].name)
        assert [len(pod.asked) for pod in pods] == [1, 1, 1, 1]
        assert router.metrics()["suspects_total"] == 0


def test_pods_whose_engines_were_dead_when_the_request_came_raise_no_suspicion() -> None:
    dead = refusal(503, "faulted")
    with scripted(dead, dead, hangs_up, says_yes) as pods, routing(*[pod.backend for pod in pods]) as router:
        answer = router.post(ending_at(router, pods[3].name))
        assert (answer.status_code, answer.headers["x-prism-pod"]) == (200, pods[3].name)
        assert [len(pod.asked) for pod in pods] == [1, 1, 1, 1]
        assert router.metrics()["suspects_total"] == 0


def test_pods_that_the_request_never_reached_raise_no_suspicion() -> None:
    with held_port() as one, held_port() as two, scripted(says_yes, says_yes, hangs_up, says_yes) as pods:
        ports = [deaf.getsockname()[1] for deaf in (one, two)]  # nobody listens there
        deaf = [f"http://127.0.0.1:{port}|http://{pod.name}" for port, pod in zip(ports, pods[:2], strict=True)]
        with routing(*deaf, pods[2].backend, pods[3].backend) as router:
            answer = router.post(ending_at(router, pods[3].name))
            assert (answer.status_code, answer.headers["x-prism-pod"]) == (200, pods[3].name)
            counts = router.metrics()
            assert (counts["retries_total{connect}"], counts["retries_total{broken}"]) == (2, 1)
            assert counts["suspects_total"] == 0


def test_a_stream_that_has_begun_with_comments_is_told_so_in_an_error_event() -> None:
    commented = threading.Event()

    async def hangs_up_late(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await until(commented.is_set)
        await hangs_up(asked, writer)

    options = {"upstream.comment_every_s": "1"}
    with scripted(*[hangs_up_late] * 3) as pods, routing(*[pod.backend for pod in pods], **options) as router:
        with httpx.stream("POST", router.api + CHAT, json=chat_body("Hello", stream=True), timeout=60) as answer:
            pieces = []
            for piece in answer.iter_text():
                pieces.append(piece)
                commented.set()
        error, done = sse_data("".join(pieces))
        assert (answer.status_code, error["error"]["code"], done) == (200, "pods_failed", "[DONE]")
        assert sum(len(pod.asked) for pod in pods) == 2


def test_a_connection_that_the_pod_has_closed_before_a_request_is_sent_has_failed() -> None:
    async def run() -> None:
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        connection = await connect(Origin(*server.sockets[0].getsockname()), 10.0)
        connection.abort()
        connection.send(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with pytest.raises(ConnectFailed):
            await connection.head()
        server.close()

    asyncio.run(run())
