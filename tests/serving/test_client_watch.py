"""A client that goes away stops its answer wherever it is."""

from __future__ import annotations

import asyncio

import pytest

from prism_server.errors import BadRequest
from prism_server.serving.client import until_client_leaves


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
