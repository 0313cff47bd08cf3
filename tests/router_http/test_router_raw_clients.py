"""Clients that speak HTTP by hand: what is ambiguous is refused, and nothing of it reaches a pod as something else."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from router_http_support import CHAT, RouterProcess, chat_body, eventually, routing
from scripted_pods import Asked, ScriptedPod, says_yes, scripted, send_chunk, start_events

from prism_server.router.server import MAX_CLIENT_HEAD_BYTES

BODY = json.dumps(chat_body("Hello")).encode()
POST = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n".encode()
LENGTH = b"content-length: %d\r\n" % len(BODY)


@pytest.fixture(scope="module")
def pod() -> Iterator[ScriptedPod]:
    with scripted(says_yes) as (only,):
        yield only


@pytest.fixture(scope="module")
def router(pod: ScriptedPod) -> Iterator[RouterProcess]:
    with routing(pod.backend) as running:
        yield running


@pytest.fixture(autouse=True)
def _nothing_stays_behind(router: RouterProcess, pod: ScriptedPod) -> Iterator[None]:
    pod.asked.clear()
    yield
    eventually(router.is_idle)


def connected(router: RouterProcess) -> socket.socket:
    url = urlsplit(router.api)
    return socket.create_connection((url.hostname, url.port), timeout=60)


def answers_to(router: RouterProcess, *pieces: bytes) -> bytes:
    """All that the router says until it hangs up; the last request must ask for that, or be refused."""
    with connected(router) as client:
        for piece in pieces:
            client.sendall(piece)
        said = b""
        while more := client.recv(1 << 16):
            said += more
        return said


def statuses(said: bytes) -> list[int]:
    return [int(part[:3]) for part in said.split(b"HTTP/1.1 ")[1:]]


def test_a_body_of_a_get_is_never_taken_for_a_request_of_its_own(router: RouterProcess, pod: ScriptedPod) -> None:
    hidden = b"POST /v1/generate HTTP/1.1\r\nhost: x\r\ncontent-length: 0\r\n\r\n"
    asking = b"GET /v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(hidden)
    assert statuses(answers_to(router, asking + hidden)) == [200]
    assert router.http.get(f"{router.api}/v1/models/next").json() == {"said": "yes"}
    assert [(asked.method, asked.target) for asked in pod.asked] == [("GET", "/v1/models"), ("GET", "/v1/models/next")]
    assert [asked.body for asked in pod.asked] == [hidden, b""]


@pytest.mark.parametrize(
    "framing",
    [
        LENGTH + b"transfer-encoding: chunked\r\n",
        b"transfer-encoding: chunked\r\n" + LENGTH,
        LENGTH + b"content-length: 5\r\n",
        LENGTH + LENGTH,
        b"content-length: -1\r\n",
        b"content-length: +5\r\n",
        b"content-length: 99999999999999999999\r\n",
        b"transfer-encoding: chunked, identity\r\n",
        b"transfer-encoding : chunked\r\n",
        b"x-split: a\x00b\r\n" + LENGTH,
        b"x-bare: a\rx-b: b\r\n" + LENGTH,
        b" folded: before any header\r\n" + LENGTH,
    ],
)
def test_a_request_whose_end_is_ambiguous_is_400_and_reaches_nobody(
    router: RouterProcess, pod: ScriptedPod, framing: bytes
) -> None:
    said = answers_to(router, POST + framing + b"\r\n" + BODY)
    assert statuses(said) == [400]
    assert b'"code":"bad_http"' in said
    assert pod.asked == []


def test_a_chunked_body_is_forwarded_with_a_length_and_without_its_trailers(
    router: RouterProcess, pod: ScriptedPod
) -> None:
    head = POST + b"transfer-encoding: chunked\r\nconnection: close\r\ntrailer: authorization\r\n\r\n"
    middle = len(BODY) // 2
    chunks = b"".join(b"%x;note=1\r\n%s\r\n" % (len(part), part) for part in (BODY[:middle], BODY[middle:]))
    assert statuses(answers_to(router, head, chunks, b"0\r\nauthorization: Bearer late\r\n\r\n")) == [200]
    (asked,) = pod.asked
    assert asked.body == BODY
    assert [asked.header(name) for name in ("content-length", "transfer-encoding", "trailer", "authorization")] == [
        str(len(BODY)),
        None,
        None,
        None,
    ]


def test_a_client_that_asks_before_it_sends_its_body_is_told_to_go_on_or_not(
    router: RouterProcess, pod: ScriptedPod
) -> None:
    with connected(router) as client:
        client.sendall(POST + LENGTH + b"expect: 100-continue\r\nconnection: close\r\n\r\n")
        assert client.recv(1 << 16) == b"HTTP/1.1 100 Continue\r\n\r\n"
        client.sendall(BODY)
        assert client.recv(1 << 16).startswith(b"HTTP/1.1 200")
    assert pod.asked[0].header("expect") is None
    too_large = b"content-length: 999999999999\r\nexpect: 100-continue\r\n\r\n"
    assert statuses(answers_to(router, POST + too_large)) == [413]


def test_requests_sent_at_once_are_answered_in_their_order(router: RouterProcess, pod: ScriptedPod) -> None:
    asking = b"".join(b"GET /v1/models/%d HTTP/1.1\r\nhost: x\r\n\r\n" % i for i in range(3))
    last = b"GET /livez HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    said = answers_to(router, asking + last)
    assert statuses(said) == [200] * 4
    assert said.endswith(b'{"alive":true}')
    assert [asked.target for asked in pod.asked] == [f"/v1/models/{i}" for i in range(3)]


def test_a_connection_goes_on_after_a_refusal_whose_body_nobody_wanted(router: RouterProcess, pod: ScriptedPod) -> None:
    large = b"x" * 300_000
    unwanted = b"POST /v1/models HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(large) + large
    last = POST + LENGTH + b"connection: close\r\n\r\n" + BODY
    assert statuses(answers_to(router, unwanted, unwanted, last)) == [405, 405, 200]
    assert [asked.body for asked in pod.asked] == [BODY]


def test_other_methods_are_405_and_say_which_are_taken(router: RouterProcess, pod: ScriptedPod) -> None:
    for method, path, allowed in (
        ("OPTIONS", CHAT, "POST"),
        ("HEAD", CHAT, "POST"),
        ("DELETE", "/v1/models/x", "GET"),
        ("HEAD", "/v1/models", "GET"),
    ):
        answer = router.http.request(method, router.api + path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    assert router.http.head(f"{router.api}/readyz").content == b""
    assert pod.asked == []


@pytest.mark.parametrize(
    "path",
    [
        f"{CHAT}/",
        f"/{CHAT}",
        "/v1//models",
        "/v1/models/",
        "/v1/models//x",
        "/v1/models/%2e%2e/%2e%2e/internal/cache",
        "/v1/models/..%2f..%2finternal%2fcache",
        "/v1/models/x/../../../internal/cache",
        "/V1/models",
        "/v1/models;/x",
        "/internal/cache#/v1/models",
        "http://pod/internal/cache",
    ],
)
def test_no_other_spelling_of_a_path_goes_round_the_list(router: RouterProcess, pod: ScriptedPod, path: str) -> None:
    said = answers_to(router, f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    assert statuses(said) == [404]
    assert pod.asked == []


def test_an_upgrade_is_not_made_and_not_passed_on(router: RouterProcess, pod: ScriptedPod) -> None:
    upgrade = b"connection: upgrade, close\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
    assert statuses(answers_to(router, b"GET /v1/realtime HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n")) == [404]
    assert statuses(answers_to(router, b"GET /v1/models HTTP/1.1\r\nhost: x\r\n" + upgrade + b"\r\n")) == [200]
    (asked,) = pod.asked
    assert [asked.header(name) for name in ("upgrade", "connection")] == [None, None]
    assert statuses(answers_to(router, b"CONNECT pod:8000 HTTP/1.1\r\nhost: x\r\n\r\n")) == [400]


def test_what_a_client_says_of_itself_passes_and_a_body_may_be_compressed(
    router: RouterProcess, pod: ScriptedPod
) -> None:
    said = b"authorization: Bearer key\r\nx-forwarded-for: 203.0.113.9\r\ncontent-encoding: gzip\r\n"
    body = b"\x1f\x8b\x08 no JSON"
    head = POST + said + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    assert statuses(answers_to(router, head + body)) == [200]
    (asked,) = pod.asked
    assert asked.body == body
    assert [asked.header(name) for name in ("authorization", "x-forwarded-for", "content-encoding")] == [
        "Bearer key",
        "203.0.113.9",
        "gzip",
    ]


# --- clients that stall


def test_a_client_that_stalls_in_its_body_is_408_and_leaves_nothing_behind() -> None:
    with scripted(says_yes) as (pod,), routing(pod.backend, **{"http.client_timeout_s": "1"}) as router:
        said = answers_to(router, POST + b"content-length: 200000\r\n\r\n" + b"x" * 100_000)
        assert statuses(said) == [408]
        assert b'"code":"request_timeout"' in said
        eventually(router.is_idle)
        assert router.metrics()["client_disconnects_total"] == 1
        assert pod.asked == []


def test_a_client_that_takes_nothing_of_its_stream_loses_it_and_its_pod_is_free() -> None:
    async def floods(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await start_events(writer)
        while True:
            await send_chunk(writer, b"data: " + b"x" * (1 << 16) + b"\n\n")

    options = {"http.client_timeout_s": "1"}
    with scripted(floods) as (pod,), routing(pod.backend, **options) as router, connected(router) as client:
        client.sendall(POST + LENGTH + b"\r\n" + BODY)
        eventually(lambda: len(pod.asked) == 1)
        eventually(router.is_idle)
        assert router.metrics()["client_disconnects_total"] == 1


def test_a_head_that_a_pod_would_not_take_is_refused_here(router: RouterProcess, pod: ScriptedPod) -> None:
    filler = b"x: %s\r\n" % (b"y" * 1000)
    within = POST + LENGTH + b"connection: close\r\n" + filler * 30 + b"\r\n" + BODY
    assert statuses(answers_to(router, within)) == [200]
    said = answers_to(router, (POST + LENGTH + b"x: ").ljust(MAX_CLIENT_HEAD_BYTES + 1, b"y"))
    assert statuses(said) == [431]
    assert b'"code":"head_too_large"' in said
    assert len(pod.asked) == 1
