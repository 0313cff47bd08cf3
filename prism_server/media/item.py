"""One medium on its way: the bytes that a request brought, the facts about them, the patches made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prism_server.identity import Digest, MediaOptions, content_id, frames_id

IsWanted = Callable[[], bool]
"""Asked now and then by long work, from a worker: whether anybody still waits for it."""


class Unwanted(Exception):
    """Ends work that nobody waits for any more."""


@dataclass(frozen=True, slots=True)
class MediaItem:
    """One medium as a request brought it. `data` are the encoded bytes (JPEG, PNG, MP4, ...), base64 already undone.

    A clip may come as a list of pictures instead: then they are `frames`, and `data` is empty.
    """

    kind: str
    data: bytes = field(repr=False)
    options: MediaOptions = MediaOptions()
    param: str = "messages"
    """The request field it came in, for error messages."""
    frames: tuple[bytes, ...] = field(default=(), repr=False)

    @property
    def num_bytes(self) -> int:
        return len(self.data) + sum(map(len, self.frames))

    @property
    def content_id(self) -> Digest:
        """Hashes all of the bytes."""
        return frames_id(self.frames) if self.frames else content_id(self.kind, self.data)


@dataclass(frozen=True, slots=True)
class ItemKey:
    """Names an item's patches and features: same bytes shown in the same way."""

    content_id: Digest
    layout: Digest


@dataclass(frozen=True, slots=True)
class ClipFacts:
    """Which frames of a clip are shown, and when: one choice, for the pixels and for the times in the prompt alike.

    `frames`: int32 [n], read-only, numbers of frames in order of presentation, never falling. `pair_times_s`:
    float64 [t], read-only, the middle of each run of frames that one temporal patch holds, in seconds. `lowered`: fewer
    or smaller frames than asked for, to stay within the server's tokens for a clip.
    """

    frames: npt.NDArray[np.int32] = field(repr=False)
    pair_times_s: npt.NDArray[np.float64] = field(repr=False)
    lowered: bool = False


FRAMES_OF_A_SHARE = 16
"""Frames of a clip that take about as much memory as all other facts of an item."""


@dataclass(frozen=True, slots=True)
class ItemFacts:
    """What is known about an item without its pixels (some 200 bytes; outlives every cache of pixels).

    `grid` is (t, h, w) in patches; `num_tokens` = t * h * w / merge^2 placeholder tokens. `width` and `height` are
    those of the medium, upright, in pixels.
    """

    key: ItemKey
    kind: str
    grid: tuple[int, int, int]
    num_tokens: int
    width: int
    height: int
    clip: ClipFacts | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        t, h, w = self.grid
        if self.clip is not None and len(self.clip.pair_times_s) != t:
            raise ValueError(f"{len(self.clip.pair_times_s)} times for a clip of grid {self.grid}")
        if min(t, h, w) < 1 or self.num_tokens < 1 or (t * h * w) % self.num_tokens:
            raise ValueError(f"inconsistent item facts: grid {self.grid}, {self.num_tokens} tokens")

    @property
    def num_patches(self) -> int:
        t, h, w = self.grid
        return t * h * w

    @property
    def num_shares(self) -> int:
        """Memory it takes, in that of a picture's facts."""
        return 1 if self.clip is None else 1 + len(self.clip.frames) // FRAMES_OF_A_SHARE


@dataclass(frozen=True, slots=True)
class Patches:
    """An item's pixels in the model's patch order.

    `pixels`: uint8 [num_patches, channels, frames, patch, patch], frames = 1 where the one frame is shown twice
    (pictures). Normalised on the device: a quarter of the bytes of FP32, an eighth for pictures.

    `runs`: of a clip whose repeated frames are left out, int32 [t], which of those in `pixels` each temporal patch is.
    """

    grid: tuple[int, int, int]
    pixels: npt.NDArray[np.uint8] = field(repr=False)
    runs: npt.NDArray[np.int32] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        t, h, w = self.stored_grid
        if self.runs is not None and len(self.runs) != self.grid[0]:
            raise ValueError(f"{len(self.runs)} temporal patches for a grid of {self.grid}")
        if self.pixels.dtype != np.uint8 or self.pixels.ndim != 5 or self.pixels.shape[0] != t * h * w:
            raise ValueError(f"patches of grid {self.grid} cannot be {self.pixels.dtype} {self.pixels.shape}")

    @property
    def stored_grid(self) -> tuple[int, int, int]:
        """The grid of `pixels`: what is left of `grid` without repeated frames."""
        t, h, w = self.grid
        return (t if self.runs is None else int(self.runs.max()) + 1), h, w

    @property
    def num_bytes(self) -> int:
        return self.pixels.nbytes
