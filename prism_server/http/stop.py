"""An orderly end: who asks for it, and waiting for those who are inside."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable

POLL_S = 0.1
LAST_WORDS_S = 5.0
"""For streams that were told to end, to send their last event."""


class StopSignal:
    """SIGTERM or Ctrl-C asks to stop, as does whoever sets `asked`; a signal after that asks to hurry."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.hurry = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal)

    def _on_signal(self) -> None:
        (self.hurry if self.asked.is_set() else self.asked).set()


async def until_empty(num_inside: Callable[[], int], timeout_s: float, cut_short: asyncio.Event | None = None) -> None:
    """Waits until nobody is inside, for `timeout_s` at the most."""
    cut_short = cut_short or asyncio.Event()
    end_s = time.monotonic() + timeout_s
    while num_inside() and not cut_short.is_set() and time.monotonic() < end_s:
        await wait_for(cut_short, POLL_S)


async def wait_for(event: asyncio.Event, timeout_s: float) -> None:
    """Until it is set, for `timeout_s` at the most."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), timeout_s)
