"""Pods that keep failing are left alone; requests that make pods fail take none of them from others."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from router_http_support import bodies_for, chat_body, eventually, picture, routing
from scripted_pods import Asked, Script, engine_dies, hangs_up, refusal, says_yes, scripted

from prism_server.router.breaker import Blame, Breaker


def test_a_breaker_opens_after_failures_in_a_row_and_lets_one_request_probe() -> None:
    breaker = Breaker(failures_to_open=2, open_s=5.0)
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(1.0)
    assert breaker.allows(1.0)
    breaker.failed(1.0)
    assert not breaker.allows(5.9)
    assert breaker.allows(6.0)
    breaker.sent(6.0)
    assert not breaker.allows(6.1)
    breaker.failed(6.2)
    assert not breaker.allows(11.0)
    assert breaker.allows(11.3)
    breaker.sent(11.3)
    assert breaker.allows(16.4)  # the probe's client left: somebody else's turn
    breaker.succeeded()
    assert breaker.is_closed


def test_a_body_that_keeps_failing_at_a_pod_counts_once_of_a_row() -> None:
    breaker = Breaker(failures_to_open=2, open_s=5.0)
    for _ in range(5):
        breaker.failed(0.0, body=1)
    assert breaker.is_closed
    breaker.succeeded()
    breaker.failed(0.0, body=2)
    assert breaker.is_closed
    breaker.failed(0.0, body=1)
    assert not breaker.is_closed
    breaker.sent(6.0)
    breaker.failed(6.1, body=1)  # as a probe it tells as much as any other
    assert not breaker.allows(11.0)


def checksum() -> int:
    return 7


def test_a_request_that_fails_at_several_pods_is_held_against_none() -> None:
    pods = [Breaker(failures_to_open=1, open_s=5.0) for _ in range(3)]
    blame = Blame()
    for pod in pods:
        blame.failed(pod, 0.0, is_certain=False)
    blame.nobody_else(1.0, checksum)
    assert all(pod.is_closed for pod in pods)


def test_the_answer_of_another_pod_shows_whose_fault_it_was() -> None:
    pods = [Breaker(failures_to_open=1, open_s=5.0) for _ in range(2)]
    blame = Blame()
    for pod in pods:
        blame.failed(pod, 0.0, is_certain=False)
        assert pod.is_closed
    blame.answered(1.0)
    assert not any(pod.allows(5.9) for pod in pods)


def test_what_no_request_can_have_caused_is_a_pods_fault_at_once() -> None:
    pod, blame = Breaker(failures_to_open=2, open_s=5.0), Blame()
    for _ in range(2):
        blame.failed(pod, 0.0, is_certain=True)
    assert not pod.is_closed


def test_where_no_other_pod_can_be_asked_each_body_is_held_against_it_once() -> None:
    pod = Breaker(failures_to_open=2, open_s=5.0)
    for body, is_closed in ((1, True), (1, True), (2, False)):
        blame = Blame()
        blame.failed(pod, 0.0, is_certain=False)
        blame.nobody_else(0.0, partial(int, body))
        assert pod.is_closed is is_closed


# --- through the router


def test_a_pod_that_keeps_failing_is_left_alone_then_tried_with_one_request() -> None:
    options = {"upstream.breaker_failures": "2", "upstream.breaker_open_s": "3", "upstream.max_tries": "1"}
    with scripted(hangs_up) as (pod,), routing(pod.backend, **options) as router:
        for i in range(5):
            assert router.post(chat_body(f"question {i}")).status_code == 503
        assert len(pod.asked) == 2
        assert router.pod(pod.name)["is_breaker_open"]
        pod.script = says_yes
        eventually(lambda: router.post(chat_body("Hello")).status_code == 200)
        assert not router.pod(pod.name)["is_breaker_open"]


def test_a_pod_that_fails_what_others_answer_is_left_alone_whatever_is_asked() -> None:
    with scripted(hangs_up, says_yes) as (one, two), routing(one.backend, two.backend) as router:
        body = next(bodies_for(router, one.name))
        for _ in range(3):
            eventually(lambda: router.decision(body)["name"] == one.name)  # nor is the picture thought to be elsewhere
            assert router.post(body).status_code == 200
        assert [router.pod(pod.name)["is_breaker_open"] for pod in (one, two)] == [True, False]
        assert (len(one.asked), len(two.asked)) == (3, 3)


@pytest.mark.parametrize(
    "options", [{"upstream.max_tries": "1"}, {"upstream.retry_share": "0", "upstream.retry_burst": "0"}]
)
def test_without_second_tries_a_pod_that_fails_is_left_alone_too(options: dict[str, str]) -> None:
    options = options | {"upstream.breaker_failures": "1", "upstream.breaker_open_s": "600"}
    with scripted(says_yes, says_yes) as pods, routing(*[pod.backend for pod in pods], **options) as router:
        body = chat_body(picture(1), "What is it?")
        home = router.decision(body)["name"]
        next(pod for pod in pods if pod.name == home).script = hangs_up
        assert [router.post(body).status_code for _ in range(2)] == [503, 200]
        assert router.pod(home)["is_breaker_open"]


@pytest.mark.parametrize("fails", [hangs_up, engine_dies, refusal(500, "internal_error")])
def test_a_request_that_makes_pods_fail_takes_none_of_them_from_others(fails: Script) -> None:
    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await (fails if b"poison" in asked.body else says_yes)(asked, writer)

    options = {"upstream.breaker_failures": "2", "upstream.breaker_open_s": "600", "upstream.retry_burst": "12"}
    with scripted(script, script, script) as pods, routing(*[pod.backend for pod in pods], **options) as router:
        for _ in range(12):  # more than there are second tries for
            assert router.post(chat_body("poison")).status_code >= 500
        assert not any(pod["is_breaker_open"] for pod in router.state()["pods"])
        assert router.post(chat_body("Hello")).status_code == 200
        eventually(router.is_idle)


@pytest.mark.parametrize("fails", [hangs_up, engine_dies])
def test_neither_do_many_such_requests(fails: Script) -> None:
    async def script(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await (fails if b"poison" in asked.body else says_yes)(asked, writer)

    options = {"upstream.breaker_failures": "2", "upstream.breaker_open_s": "600", "upstream.retry_burst": "12"}
    with scripted(script, script, script) as pods, routing(*[pod.backend for pod in pods], **options) as router:
        for i in range(12):
            assert router.post(chat_body(f"poison {i}")).status_code in (502, 503)
        assert not any(pod["is_breaker_open"] for pod in router.state()["pods"])
        assert router.post(chat_body("Hello")).status_code == 200
