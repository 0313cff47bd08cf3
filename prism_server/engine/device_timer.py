"""How long a device worked on the parts of a step: by its own clock, asked only when the step is over."""

from __future__ import annotations

import time

import torch


def new_event(with_time: bool = False) -> torch.cuda.Event:
    """A CUDA event that is not recorded yet."""
    return torch.cuda.Event(enable_timing=with_time)  # type: ignore[no-untyped-call]


class StepTimer:
    """Marks among the work that is given to a device. On CUDA a mark is an event of the current stream.

    Times are those of the device: a step that is launched while another runs is not charged for the wait.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._times_s: list[float] = []

    def mark(self) -> None:
        """Here; called by the thread that launches."""
        if self._is_cuda:
            event = new_event(with_time=True)
            event.record()
            self._events.append(event)
        else:
            self._times_s.append(time.perf_counter())

    def wait(self) -> None:
        """Until the device has passed the last mark. Raises RuntimeError for what failed on the device until then.

        The interpreter's lock is free meanwhile.
        """
        if self._is_cuda:
            self._events[-1].synchronize()

    def between_ms(self, first: int, last: int) -> float:
        """From one mark to another, both passed."""
        if self._is_cuda:
            return float(self._events[first].elapsed_time(self._events[last]))
        return (self._times_s[last] - self._times_s[first]) * 1e3
