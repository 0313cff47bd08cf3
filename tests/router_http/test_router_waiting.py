"""Requests that wait for their pod: comments keep them open, and a pod without a sign of life loses them."""

from __future__ import annotations

import asyncio

from router_http_support import CHAT, chat_body, eventually, routing, sse_data
from scripted_pods import (
    Asked,
    HangUp,
    ScriptedPod,
    answer_json,
    hangs_up,
    never,
    says_yes,
    scripted,
    send_chunk,
    start_events,
    until,
)

STREAM = chat_body("Hello", stream=True)
EVENT = 'data: {"n": 1}\n\n'


async def is_met(pod: ScriptedPod) -> None:
    """Until the router has taken in what the pod says to polls from now on: only then does it ask once more."""
    before = pod.num_polls
    await until(lambda: pod.num_polls >= before + 2)


def test_comments_keep_a_waiting_stream_open_and_another_pod_can_still_be_asked() -> None:
    text = ""

    async def waits_then_hangs_up(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await until(lambda: ": waiting" in text)
        two.poll_script = two.tells_cache
        await is_met(two)
        raise HangUp

    async def streams(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await start_events(writer)
        await send_chunk(writer, EVENT.encode())
        await until(lambda: ": waiting" in text.partition(EVENT)[2])
        await send_chunk(writer, b"data: [DONE]\n\n")
        await send_chunk(writer, b"")

    options = {"upstream.comment_every_s": "1"}
    with scripted(waits_then_hangs_up, streams) as (one, two), routing(one.backend, two.backend, **options) as router:
        two.poll_script = hangs_up  # so that the other is asked first
        eventually(lambda: not router.pod(two.name)["is_answering"])
        with router.http.stream("POST", router.api + CHAT, json=STREAM) as answer:
            for piece in answer.iter_text():
                text += piece
        assert text.startswith(": waiting\n\n")
        assert f": x-prism-pod {two.name}\n" in text
        assert sse_data(text) == [{"n": 1}, "[DONE]"]
        assert (len(one.asked), len(two.asked)) == (1, 1)


def test_a_refusal_after_the_first_comment_is_an_error_event() -> None:
    text = ""

    async def refuses_late(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if b'"stream"' in asked.body:
            await until(lambda: ": waiting" in text)
        else:
            await asyncio.sleep(2.5)  # long enough for a comment
        await answer_json(writer, {"error": {"message": "no such\npicture", "code": "bad_picture"}}, 400)

    with scripted(refuses_late) as (pod,), routing(pod.backend, **{"upstream.comment_every_s": "1"}) as router:
        with router.http.stream("POST", router.api + CHAT, json=STREAM) as answer:
            for piece in answer.iter_text():
                text += piece
        assert answer.status_code == 200
        error, done = sse_data(text)
        assert error["error"]["code"] == "bad_picture"
        assert done == "[DONE]"
        whole = router.post(chat_body("Hello"))  # nobody waits for events here: no comment, and the pod's own status
        assert whole.status_code == 400


def test_a_pod_without_a_sign_of_life_loses_its_requests_to_another() -> None:
    async def hangs(asked: Asked, writer: asyncio.StreamWriter) -> None:
        two.poll_script = two.tells_cache
        await is_met(two)
        one.poll_script = never
        await never(asked, writer)

    options = {"upstream.silence_timeout_s": "3"}
    with scripted(hangs, says_yes) as (one, two), routing(one.backend, two.backend, **options) as router:
        two.poll_script = hangs_up  # so that the other is asked first
        eventually(lambda: not router.pod(two.name)["is_answering"])
        answer = router.post(STREAM)
        assert (answer.status_code, answer.headers["x-prism-pod"]) == (200, two.name)
        assert router.metrics()["retries_total{silent}"] == 1
        eventually(lambda: one.left == 1)
