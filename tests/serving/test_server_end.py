"""The end of a server's time finds a request wherever it is before the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from prism_server.serving.http_errors import NotReady
from prism_server.serving.lifecycle import Lifecycle

OVER = NotReady("the server is shutting down", "shutting_down")
SLACK_S = 30.0


async def before_engine(life: Lifecycle, work: Coroutine[Any, Any, None]) -> str:
    """How the block ended: `engine` is where the request would be next."""
    try:
        async with life.before_engine():
            await work
    except NotReady as error:
        return error.code
    return "engine"


def test_the_end_stops_who_has_not_come_to_the_engine_and_nobody_else() -> None:
    async def scene() -> None:
        life = Lifecycle(max_inside=2)
        assert await before_engine(life, asyncio.sleep(0)) == "engine"
        waiting = asyncio.create_task(before_engine(life, asyncio.sleep(3600)))
        await asyncio.sleep(0)
        life.end(OVER)
        assert await asyncio.wait_for(waiting, SLACK_S) == "shutting_down"

    asyncio.run(scene())


def test_who_is_between_two_waits_at_the_end_hears_of_it_at_the_next() -> None:
    async def scene() -> None:
        life = Lifecycle(max_inside=2)
        life.end(OVER)
        never = asyncio.sleep(3600)
        assert await asyncio.wait_for(before_engine(life, never), SLACK_S) == "shutting_down"
        never.close()

    asyncio.run(scene())


def test_whose_wait_ends_together_with_the_servers_time_does_not_reach_the_engine() -> None:
    async def scene() -> None:
        life = Lifecycle(max_inside=2)
        prepared = asyncio.get_running_loop().create_future()

        async def prepare() -> None:
            await prepared

        waiting = asyncio.create_task(before_engine(life, prepare()))
        await asyncio.sleep(0)
        prepared.set_result(None)
        life.end(OVER)
        assert await asyncio.wait_for(waiting, SLACK_S) == "shutting_down"

    asyncio.run(scene())


def test_a_time_out_of_the_works_own_is_not_taken_for_the_end() -> None:
    async def late() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(before_engine(Lifecycle(max_inside=2), late()))
