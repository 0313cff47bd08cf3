"""One host-to-device copy a step: arrays side by side in pinned memory, and their views on the device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prism_server.engine.device_timer import new_event

Words = npt.NDArray[np.int64]

WORD_BYTES = 8
ALIGNMENT_WORDS = 16
"""Every array starts at a multiple of 128 bytes: a kernel compiled for aligned pointers never meets another one."""
RING = 2
"""Staging buffers: one is filled while the copy out of the other may not have run yet."""
TORCH_DTYPES: dict[str, torch.dtype] = {"int64": torch.int64, "int32": torch.int32, "float64": torch.float64}


def aligned(words: int) -> int:
    """The next multiple of the alignment."""
    return -(-words // ALIGNMENT_WORDS) * ALIGNMENT_WORDS


@dataclass(frozen=True, slots=True)
class Section:
    """Where an array lies in a packet: `first` in words."""

    first: int
    shape: tuple[int, ...]
    dtype: str = "int64"

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The first word after it that another array may start at."""
        return aligned(self.first + -(-self.count * np.dtype(self.dtype).itemsize // WORD_BYTES))

    def on_host(self, words: Words) -> npt.NDArray[Any]:
        """Its place in a packet's words, to be written."""
        return words[self.first : self.end].view(self.dtype)[: self.count].reshape(self.shape)

    def on_device(self, words: Tensor) -> Tensor:
        """The same of int64 words on a device."""
        return words[self.first : self.end].view(TORCH_DTYPES[self.dtype])[: self.count].view(self.shape)


class Packet:
    """The way of a step's numbers to `words`, int64 [capacity] on the device, whose address never changes.

    `begin`, any number of `append`, `send`; then `tensor` gives what was appended. The copy is in order with the
    current stream, so what an earlier step reads is not overwritten before it has read it.
    """

    def __init__(self, words: Tensor) -> None:
        self.words = words
        self._is_cuda = words.device.type == "cuda"
        self._ring = [torch.zeros(len(words), dtype=torch.int64, pin_memory=self._is_cuda) for _ in range(RING)]
        self._sent: list[torch.cuda.Event | None] = [None] * RING
        self._turn = 0
        self._end = 0

    @property
    def num_words(self) -> int:
        """Words in use since `begin`."""
        return self._end

    def begin(self, num_words: int) -> Words:
        """Start a packet; its first `num_words` words, to be written by the caller."""
        self._turn = (self._turn + 1) % RING
        event = self._sent[self._turn]
        if event is not None:
            event.synchronize()  # as good as always passed: two steps are in flight at most
        self._end = 0
        self._take(num_words)
        words: Words = self._ring[self._turn].numpy()[:num_words]
        return words

    def append(self, array: npt.NDArray[Any]) -> Section:
        """Put an array (int64, int32 or float64) behind what is there."""
        section = Section(self._end, array.shape, array.dtype.name)
        self._take(section.end - section.first)
        section.on_host(self._ring[self._turn].numpy())[...] = array
        return section

    def send(self) -> None:
        """The one copy of the step."""
        source = self._ring[self._turn][: self._end]
        self.words[: self._end].copy_(source, non_blocking=True)
        if self._is_cuda:
            event = self._sent[self._turn] or new_event()
            event.record()
            self._sent[self._turn] = event

    def tensor(self, section: Section) -> Tensor:
        return section.on_device(self.words)

    def _take(self, num_words: int) -> None:
        if self._end + num_words > len(self.words):
            raise ValueError(f"a packet of {len(self.words)} words is full: {self._end} and {num_words} more")
        self._end += num_words
