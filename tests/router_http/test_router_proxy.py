"""What goes through the router, what does not, and what happens when a pod fails. The pods do what a test says."""

from __future__ import annotations

import asyncio
import json
import socket
import socketserver
import struct
import threading
import time
from itertools import islice
from urllib.parse import urlsplit

import httpx
import pytest
from router_http_support import (
    CHAT,
    RouterProcess,
    bodies_for,
    chat_body,
    eventually,
    held_port,
    picture,
    routing,
    sse_data,
)
from scripted_pods import (
    EMPTY_CACHE,
    Asked,
    HangUp,
    answer_json,
    hangs_up,
    refusal,
    says_yes,
    scripted,
    send_chunk,
    start_events,
)

from prism_server.identity import KEY_VERSION

STREAM = chat_body("Hello", stream=True)


def test_a_body_passes_byte_for_byte_and_headers_by_their_rules() -> None:
    body = b' {"messages" :[{"role":"user","content":"caf\\u00e9 \xc3\xa9"}],  "x":1.0}\n'
    headers = {
        "content-type": "application/json",
        "authorization": "Bearer key",
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "x-request-id": "mine",
        "connection": "x-hop",
        "x-hop": "1",
        "te": "trailers",
    }
    with scripted(says_yes) as (pod,), routing(pod.backend) as router:
        answer = httpx.post(f"{router.api}{CHAT}?a=1", content=body, headers=headers, timeout=60)
        (asked,) = pod.asked
        assert asked.body == body
        assert (asked.method, asked.target) == ("POST", f"{CHAT}?a=1")
        assert [asked.header(name) for name in ("authorization", "traceparent", "x-request-id")] == [
            "Bearer key",
            headers["traceparent"],
            "mine",
        ]
        assert [asked.header(name) for name in ("x-hop", "te", "connection")] == [None, None, None]
        assert asked.header("host") == pod.name
        assert answer.json() == {"said": "yes"}
        assert answer.headers["x-request-id"] == "mine"
        assert answer.headers["x-prism-pod"] == pod.name
        assert "expected_tokens=0" in answer.headers["x-prism-cache"]
        made = router.post(chat_body("Hello"))
        assert len(made.headers["x-request-id"]) == 32
        assert pod.asked[1].header("x-request-id") == made.headers["x-request-id"]


def test_connections_to_a_pod_are_kept_unless_it_closes_them() -> None:
    async def closes(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await answer_json(writer, {}, extra="connection: close\r\n")

    async def streams(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await start_events(writer)
        await send_chunk(writer, b"data: [DONE]\n\n")
        await send_chunk(writer, b"")

    with scripted(says_yes, says_yes) as (pod, polled), routing(f"http://{pod.name}|http://{polled.name}") as router:
        router.post(STREAM)
        before = pod.num_connections
        for script in (says_yes, streams, says_yes, streams):
            pod.script = script
            assert router.post(STREAM).status_code == 200
        assert pod.num_connections == before
        pod.script = closes
        assert [router.post(STREAM).status_code for _ in range(2)] == [200, 200]
        eventually(lambda: pod.num_connections > before)


def test_a_pod_of_an_unknown_key_version_gets_requests_by_place_and_load() -> None:
    with scripted(says_yes, says_yes) as pods, routing(*[pod.backend for pod in pods]) as router:
        for pod in pods:
            pod.cache = EMPTY_CACHE | {"key_version": KEY_VERSION + 1}
        eventually(lambda: router.metrics()["key_version_mismatch_pods"] == 2)
        for question in ("What is it?", "And now?"):
            # Ports decide who is whose home: all 32 at one pod is one run in two billion.
            answers = [router.post(chat_body(picture(seed), question)) for seed in range(32)]
            assert {answer.headers["x-prism-pod"] for answer in answers} == {pod.name for pod in pods}
            for answer in answers:
                reason, media, *_ = answer.headers["x-prism-cache"].split("; ")
                assert (reason in ("home", "spill"), media) == (True, "media=0/1")
        assert router.metrics()["key_version_mismatches_total"] == 64


def test_a_pod_that_does_not_say_what_it_holds_is_still_used() -> None:
    with scripted(says_yes) as (pod,):
        pod.cache = {"another": "program"}
        router = RouterProcess(**{"discovery.backends": pod.backend})
        try:
            eventually(lambda: router.pod(pod.name)["is_answering"])
            assert "/internal/cache" in router.pod(pod.name)["problem"]
            assert router.post(chat_body(picture(1), "What is it?")).status_code == 200
            assert router.pod(pod.name)["cache_age_s"] is None
            assert router.log().count("/internal/cache") == 1  # said once, not at every poll
        finally:
            router.close()


def test_only_the_listed_paths_reach_a_pod() -> None:
    with scripted(says_yes) as (pod,), routing(pod.backend) as router:
        for path in ("/internal/capacity", "/metrics", "/v1/embeddings", "/v1/models/../../internal/cache", "/x"):
            url = urlsplit(router.api)
            with socket.create_connection((url.hostname, url.port)) as raw:  # no client may tidy the path up
                raw.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
                assert raw.recv(1 << 16).startswith(b"HTTP/1.1 404"), path
        assert router.http.get(router.api + CHAT).status_code == 405
        assert router.post({}, "/v1/models").status_code == 405
        assert pod.asked == []
        for path in ("/v1/completions", "/v1/generate"):
            assert router.post({"prompt": "x"}, path).status_code == 200
        assert router.http.get(f"{router.api}/v1/models/org/name").status_code == 200
        assert [asked.target for asked in pod.asked] == ["/v1/completions", "/v1/generate", "/v1/models/org/name"]


def test_a_body_of_60_mb_passes_and_one_above_the_cap_is_413() -> None:
    with scripted(says_yes) as (pod,), routing(pod.backend, **{"http.max_body_bytes": str(64 << 20)}) as router:
        large = json.dumps(chat_body("x" * (60 << 20))).encode()
        assert router.http.post(router.api + CHAT, content=large).status_code == 200
        assert pod.asked.pop().body == large
        too_large = b"x" * ((64 << 20) + 1)
        declared = router.http.post(router.api + CHAT, content=too_large)
        pieces = (too_large[at : at + (1 << 20)] for at in range(0, len(too_large), 1 << 20))
        chunked = router.http.post(router.api + CHAT, content=pieces)
        assert [declared.status_code, chunked.status_code] == [413, 413]
        assert declared.json()["error"]["code"] == "body_too_large"
        assert pod.asked == []
        eventually(router.is_idle)


def test_bodies_beyond_what_the_router_may_hold_are_429() -> None:
    with scripted(says_yes) as (pod,), routing(pod.backend, **{"http.max_buffered_bytes": "1000"}) as router:
        refused = router.post(chat_body("x" * 2000))
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert router.post(chat_body("x")).status_code == 200
        eventually(router.is_idle)


def test_a_4xx_of_a_pod_passes_unchanged_and_is_not_tried_elsewhere() -> None:
    with (
        scripted(refusal(400, "bad_picture"), refusal(400, "bad_picture")) as pods,
        routing(*[pod.backend for pod in pods]) as router,
    ):
        answer = router.post(STREAM)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "bad_picture")
        assert sum(len(pod.asked) for pod in pods) == 1


@pytest.mark.parametrize("first", [refusal(429, "full"), refusal(503, "loading")])
def test_what_a_pod_does_not_take_is_tried_at_another(first: object) -> None:
    with scripted(first, first, says_yes) as pods, routing(*[pod.backend for pod in pods]) as router:  # type: ignore[arg-type]
        for body in [body for pod in pods for body in islice(bodies_for(router, pod.name), 4)]:
            answer = router.post(body)
            assert (answer.status_code, answer.headers["x-prism-pod"]) == (200, pods[2].name)
        assert min(len(pod.asked) for pod in pods) >= 1
        assert all(len({asked.header("x-request-id") for asked in pod.asked}) == len(pod.asked) for pod in pods)
        eventually(router.is_idle)


def test_a_pod_that_nobody_listens_at_costs_a_request_nothing() -> None:
    with scripted(says_yes, says_yes) as (one, two), routing(one.backend, two.backend) as router:
        bodies = list(islice(bodies_for(router, one.name), 6))
        one.close_listener()
        assert [router.post(body).status_code for body in bodies] == [200] * 6
        assert len(two.asked) == 6
        eventually(lambda: not router.pod(one.name)["is_answering"])


def test_a_pod_that_closes_connections_at_once_costs_a_request_nothing() -> None:
    class ClosesAtOnce(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # with a reset

    with (
        scripted(says_yes, says_yes) as (one, two),
        socketserver.ThreadingTCPServer(("127.0.0.1", 0), ClosesAtOnce) as api,
    ):
        threading.Thread(target=api.serve_forever, daemon=True).start()
        name = f"127.0.0.1:{api.server_address[1]}"
        with routing(f"http://{name}|http://{one.name}", two.backend) as router:
            bodies = list(islice(bodies_for(router, name), 8))
            assert [router.post(body).status_code for body in bodies] == [200] * 8
            retries = {name for name in router.metrics() if name.startswith("retries_total")}
            assert retries <= {"retries_total{broken}", "retries_total{connect}"}
            assert retries
        api.shutdown()


def test_no_pod_is_asked_twice_and_then_the_answer_is_503_with_retry_after() -> None:
    with held_port() as deaf, scripted(hangs_up, says_yes) as (one, two):
        nobody_listens = f"http://127.0.0.1:{deaf.getsockname()[1]}|http://{two.name}"
        with routing(one.backend, nobody_listens) as router:
            answer = router.post(STREAM)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_pod")
            assert int(answer.headers["retry-after"]) >= 1
            assert (len(one.asked), len(two.asked)) == (1, 0)
            assert sum(count for name, count in router.metrics().items() if name.startswith("retries_total")) == 1


def test_when_all_are_overloaded_their_429_and_retry_after_are_passed_on() -> None:
    with (
        scripted(refusal(429, "full", 7), refusal(429, "full", 7)) as pods,
        routing(*[pod.backend for pod in pods]) as router,
    ):
        answer = router.post(STREAM)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "7")
        again = router.post(STREAM)  # both have asked for patience: they are left alone
        assert again.status_code == 429
        assert 1 <= int(again.headers["retry-after"]) <= 7
        assert [len(pod.asked) for pod in pods] == [1, 1]


def test_second_tries_are_a_share_of_all_requests() -> None:
    options = {"upstream.retry_burst": "2", "upstream.retry_share": "0", "upstream.breaker_failures": "1000"}
    with scripted(hangs_up, hangs_up) as pods, routing(*[pod.backend for pod in pods], **options) as router:
        assert [router.post(chat_body(f"q {i}")).status_code for i in range(10)] == [502] * 2 + [503] * 8
        assert sum(len(pod.asked) for pod in pods) == 12
        assert router.metrics()["retries_denied_total"] == 8


def test_a_stream_that_breaks_ends_in_an_error_event_and_never_in_half_an_event() -> None:
    async def breaks(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await start_events(writer)
        await send_chunk(writer, b'data: {"n": 1}\n\ndata: {"n": 2}\n\ndata: {"n"')
        await asyncio.sleep(0.1)
        raise HangUp

    with scripted(breaks, breaks) as pods, routing(*[pod.backend for pod in pods]) as router:
        chat = sse_data(router.post(STREAM).text)
        assert chat[:2] == [{"n": 1}, {"n": 2}]
        assert chat[2]["error"]["code"] == "upstream_failed"
        assert chat[3:] == ["[DONE]"]
        native = router.post({"prompt": "x"}, "/v1/generate").text
        assert native.count("event: error\ndata: ") == 1
        assert sse_data(native)[-1]["error"]["code"] == "upstream_failed"
        assert sum(len(pod.asked) for pod in pods) == 2
        eventually(router.is_idle)


def test_an_answer_in_one_piece_that_breaks_is_seen_to_be_broken() -> None:
    async def breaks(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{")
        await writer.drain()
        await asyncio.sleep(0.1)
        raise HangUp

    with scripted(breaks) as (pod,), routing(pod.backend) as router:
        with pytest.raises(httpx.RemoteProtocolError):
            router.post(chat_body("Hello"))
        eventually(router.is_idle)


def test_a_client_that_leaves_takes_the_pods_work_with_it() -> None:
    async def streams_for_ever(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if b"silent" in asked.body:
            await asyncio.sleep(3600)
        await start_events(writer)
        while True:
            await send_chunk(writer, b'data: {"n": 1}\n\n')
            await asyncio.sleep(0.01)

    with scripted(streams_for_ever) as (pod,), routing(pod.backend) as router:
        url = urlsplit(router.api)
        for text, share, num_asked in (("silent", 1.0, 1), ("streaming", 1.0, 2), ("streaming", 0.5, 2)):
            body = json.dumps(chat_body(text, stream=True)).encode()
            request = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body
            with socket.create_connection((url.hostname, url.port)) as client:
                client.sendall(request[: int(share * len(request))])
                eventually(lambda: router.metrics()["open_requests"] == 1)
                eventually(lambda count=num_asked: len(pod.asked) == count)
                assert router.metrics()["in_flight"] == (share == 1.0)
            eventually(router.is_idle)
        eventually(lambda: pod.left == 2)
        assert router.metrics()["client_disconnects_total"] == 3


def test_a_client_that_does_not_read_slows_its_pod_down_and_nobody_else() -> None:
    sent = 0

    async def floods(asked: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        if b"flood" not in asked.body:
            return await says_yes(asked, writer)
        await start_events(writer)
        piece = b"data: " + b"x" * (1 << 16) + b"\n\n"
        while True:
            await send_chunk(writer, piece)
            sent += len(piece)

    with scripted(floods) as (pod,), routing(pod.backend) as router:
        url = urlsplit(router.api)
        body = json.dumps(chat_body("flood", stream=True)).encode()
        with socket.create_connection((url.hostname, url.port)) as client:
            client.sendall(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body)
            eventually(lambda: sent > 0)
            stalled_at = -1
            while stalled_at != sent:
                stalled_at = sent
                time.sleep(0.5)
            assert 0 < sent < 64 << 20
            assert router.post(chat_body("Hello")).status_code == 200
        eventually(router.is_idle)


def test_without_pods_the_router_is_ready_and_answers_503_with_retry_after() -> None:
    router = RouterProcess(**{"discovery.backends": "http://127.0.0.1:1"})
    try:
        eventually(lambda: router.http.get(f"{router.api}/readyz").status_code == 200)
        answer = router.post(STREAM)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_pod")
        assert int(answer.headers["retry-after"]) >= 1
        assert router.metrics()["unplaced_total{no_pods}"] == 1
    finally:
        router.close()
