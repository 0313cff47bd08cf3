"""An orderly end: signals, and how long those who are inside are waited for."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Coroutine
from typing import Any

import pytest

from prism_server.http.stop import StopSignal, until_empty

SLACK_S = 30.0
LONG_S = 3600.0


def run(scene: Coroutine[Any, Any, None]) -> None:
    async def within_slack() -> None:
        async with asyncio.timeout(SLACK_S):
            await scene

    asyncio.run(within_slack())


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_asks_to_stop_and_a_second_one_to_hurry(number: signal.Signals) -> None:
    async def scene() -> None:
        stop = StopSignal()
        os.kill(os.getpid(), number)
        await stop.asked.wait()
        assert not stop.hurry.is_set()
        os.kill(os.getpid(), number)
        await stop.hurry.wait()

    run(scene())


def test_a_signal_after_the_stop_was_asked_for_otherwise_asks_to_hurry() -> None:
    async def scene() -> None:
        stop = StopSignal()
        stop.asked.set()
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.hurry.wait()

    run(scene())


def test_the_wait_ends_with_the_last_one_inside() -> None:
    async def scene() -> None:
        inside = [1, 1]
        leaving = asyncio.get_running_loop().call_later(0.05, inside.clear)
        await until_empty(lambda: len(inside), LONG_S)
        assert not inside
        leaving.cancel()

    run(scene())


def test_the_wait_ends_with_its_time_or_when_it_is_cut_short() -> None:
    async def scene() -> None:
        await until_empty(lambda: 1, 0.01)
        hurry = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, hurry.set)
        await until_empty(lambda: 1, LONG_S, hurry)

    run(scene())
