"""Bodies in pieces: what came is what is read, whatever the network made of it."""

from __future__ import annotations

import json
import socket
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_support import ServerProcess, chat_body, eventually, serving

from prism_server.errors import Overloaded
from prism_server.http.byte_budget import ByteBudget
from prism_server.serving.body import LEAST_PIECE_BYTES, Body, budget_for

SIZES = st.sampled_from(
    [0, 1, 7, LEAST_PIECE_BYTES - 1, LEAST_PIECE_BYTES, LEAST_PIECE_BYTES + 1, 3 * LEAST_PIECE_BYTES]
)


def unbounded() -> ByteBudget:
    return ByteBudget("the server", 1 << 40)


@given(st.lists(SIZES, max_size=12))
def test_a_body_is_its_pieces_in_order(sizes: list[int]) -> None:
    pieces = [bytes([i]) * size for i, size in enumerate(sizes)]
    body = Body(unbounded())
    for piece in pieces:
        body.add(piece)
    assert body.take() == b"".join(pieces)


def test_a_body_is_let_go_when_it_is_taken() -> None:
    body = Body(unbounded())
    body.add(b"once")
    assert body.take() == b"once"
    assert body.take() == b""


def test_a_body_of_crumbs_takes_little_more_room_than_its_bytes() -> None:
    body, num_crumbs = Body(unbounded()), 50_000
    tracemalloc.start()
    try:
        for i in range(num_crumbs):
            body.add(i.to_bytes(2, "little"))
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used_bytes < 2 * (2 * num_crumbs + LEAST_PIECE_BYTES)
    assert len(body.take()) == 2 * num_crumbs


# -- all of them together --------------------------------------------------------------------------------------------


def test_bodies_count_until_they_are_let_go_of() -> None:
    budget = ByteBudget("the server", 10)
    one, other = Body(budget), Body(budget)
    one.add(b"123456")
    other.add(b"1234")
    assert one.take() == b"123456"  # what was in it is still there
    with pytest.raises(Overloaded, match="10 bytes"):
        other.add(b"5")
    one.let_go()
    one.let_go()
    assert budget.held_bytes == 4
    other.add(b"567890")
    other.let_go()
    assert budget.held_bytes == 0


def test_there_is_room_for_some_of_the_largest_and_for_usual_ones_of_everybody() -> None:
    assert budget_for(max_body_bytes=128 << 20, max_inside=320).most_bytes == 1 << 30
    assert budget_for(max_body_bytes=8 << 20, max_inside=100).most_bytes == 200 << 20


HALF_BYTES = 6 << 20
"""Of a body that does not go on. With bodies of 8 MiB at most and few sequences, ten of them are all that is held."""
SMALL_BODIES = {"http.max_body_bytes": str(8 << 20), "engine.max_running_sequences": "2"}


@contextmanager
def half_a_body(server: ServerProcess) -> Iterator[socket.socket]:
    host, port = server.api.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=60) as client:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: here\r\ncontent-length: {HALF_BYTES + 1000}\r\n\r\n"
        client.sendall(head.encode() + b" " * HALF_BYTES)
        yield client


def test_bodies_of_all_requests_have_a_limit_together_and_nobody_else_loses_by_it() -> None:
    options = SMALL_BODIES | {"engine.max_waiting_requests": "28"}
    with serving(**options) as server, ExitStack() as clients:
        for _ in range(10):
            clients.enter_context(half_a_body(server))
        eventually(lambda: server.capacity()["inside"] == 10, 60)
        eventually(lambda: b"429" in refused(server), 60)  # once the last ones have arrived
        # What the last one that was refused has sent counts until the server has seen it go.
        eventually(lambda: server.chat("Hello!").status_code == 200, 60)
        clients.close()
        eventually(server.is_idle, 60)
        padded = b" " * HALF_BYTES + json.dumps(chat_body("Hello!", max_tokens=1)).encode()
        for stream in (b"false", b"true") * 6:  # 72 MiB, one after the other
            body = padded[:-1] + b', "stream": ' + stream + b"}"
            answer = server.http.post(f"{server.api}/v1/chat/completions", content=body)
            assert answer.status_code == 200, answer.text
        eventually(lambda: server.capacity()["inside"] == 0, 60)


def refused(server: ServerProcess) -> bytes:
    """What the server says to one more, if it says anything now."""
    with half_a_body(server) as client:
        client.settimeout(1)
        try:
            return client.recv(4096)
        except TimeoutError:
            return b""


def test_a_body_that_never_ends_is_408_at_the_request_s_deadline() -> None:
    with serving(**{"http.request_timeout_s": "1"}) as server, half_a_body(server) as client:
        answer = b""
        while b"}}" not in answer:
            piece = client.recv(4096)
            assert piece, answer
            answer += piece
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b'"code":"request_timeout"' in answer
        eventually(lambda: server.capacity()["inside"] == 0, 60)
