"""One medium on its way: the bytes that a request brought, the facts about them, the patches made of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prism_server.identity import Digest, MediaOptions


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One medium as a request brought it. `data` are the encoded bytes (JPEG, PNG, ...), base64 already undone."""

    kind: str
    data: bytes = field(repr=False)
    options: MediaOptions = MediaOptions()
    param: str = "messages"
    """The request field it came in, for error messages."""


@dataclass(frozen=True, slots=True)
class ItemKey:
    """Names an item's patches and features: same bytes shown in the same way."""

    content_id: Digest
    layout: Digest


@dataclass(frozen=True, slots=True)
class ItemFacts:
    """What is known about an item without its pixels (some 200 bytes; outlives every cache of pixels).

    `grid` is (t, h, w) in patches; `num_tokens` = t * h * w / merge^2 placeholder tokens.
    """

    key: ItemKey
    kind: str
    grid: tuple[int, int, int]
    num_tokens: int
    width: int
    height: int

    def __post_init__(self) -> None:
        t, h, w = self.grid
        if min(t, h, w) < 1 or self.num_tokens < 1 or (t * h * w) % self.num_tokens:
            raise ValueError(f"inconsistent item facts: grid {self.grid}, {self.num_tokens} tokens")

    @property
    def num_patches(self) -> int:
        t, h, w = self.grid
        return t * h * w


@dataclass(frozen=True, slots=True)
class Patches:
    """An item's pixels in the model's patch order.

    `pixels`: uint8 [num_patches, channels, frames, patch, patch], frames = 1 where the one frame is shown twice
    (pictures). Normalised on the device: a quarter of the bytes of FP32, an eighth for pictures.
    """

    grid: tuple[int, int, int]
    pixels: npt.NDArray[np.uint8] = field(repr=False)

    def __post_init__(self) -> None:
        t, h, w = self.grid
        if self.pixels.dtype != np.uint8 or self.pixels.ndim != 5 or self.pixels.shape[0] != t * h * w:
            raise ValueError(f"patches of grid {self.grid} cannot be {self.pixels.dtype} {self.pixels.shape}")

    @property
    def num_bytes(self) -> int:
        return self.pixels.nbytes
