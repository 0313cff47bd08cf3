"""A client that goes away stops its answer wherever it is; a body is read within bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect, Request

from prism_server.errors import BadRequest
from prism_server.serving.client import read_body, until_client_leaves


def connection(*chunks: bytes, ends: str = "never", **headers: str) -> Request:
    """A request whose body arrives in chunks; then the client stays or, with `ends="leaves"`, goes."""

    def messages() -> Iterator[dict[str, Any]]:
        for i, chunk in enumerate(chunks):
            is_last = ends == "never" and i == len(chunks) - 1
            yield {"type": "http.request", "body": chunk, "more_body": not is_last}
        yield {"type": "http.disconnect"}

    source = messages()

    async def receive() -> dict[str, Any]:
        return next(source)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "headers": raw}, receive)


def test_a_body_is_its_chunks() -> None:
    assert asyncio.run(read_body(connection(b"ab", b"", b"c"), 3)) == b"abc"


def test_a_declared_length_beyond_the_cap_is_a_413_before_a_byte_is_read() -> None:
    with pytest.raises(BadRequest) as caught:
        asyncio.run(read_body(connection(ends="leaves", content_length="4"), 3))
    assert caught.value.status == 413


def test_an_undeclared_length_beyond_the_cap_is_a_413_as_soon_as_it_shows() -> None:
    with pytest.raises(BadRequest) as caught:
        asyncio.run(read_body(connection(b"abc", b"d", ends="leaves"), 3))
    assert caught.value.status == 413


def test_a_client_that_leaves_in_its_body_is_told_apart() -> None:
    with pytest.raises(ClientDisconnect):
        asyncio.run(read_body(connection(b"ab", ends="leaves"), 3))


def test_a_client_that_leaves_stops_its_answer_which_cleans_up_first() -> None:
    said: list[str] = []

    async def answer() -> None:
        try:
            await asyncio.sleep(60)
            said.append("answered")
        finally:
            await asyncio.sleep(0)
            said.append("cleaned up")

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    assert asyncio.run(until_client_leaves(receive, answer())) is False
    assert said == ["cleaned up"]


def test_an_answer_that_ends_first_is_all_there_is_and_its_error_is_raised() -> None:
    async def receive() -> dict[str, str]:
        await asyncio.sleep(60)
        return {"type": "http.disconnect"}

    async def good() -> None:
        await asyncio.sleep(0)

    async def bad() -> None:
        raise BadRequest("no")

    assert asyncio.run(until_client_leaves(receive, good())) is True
    with pytest.raises(BadRequest):
        asyncio.run(until_client_leaves(receive, bad()))
