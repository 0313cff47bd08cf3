"""A prompt as the engine gets it: ids, positions, media spans and keys, all ready (the owner only looks things up)."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prism_server.identity import Digest
from prism_server.media.item import ItemFacts


@dataclass(frozen=True, slots=True)
class MediaSpan:
    """Where one frame's placeholder rows lie: [start, end); `close` is one past the last vision token that closes it.

    The rows show the item's feature rows from `item_offset` (a clip has one span for each pair of frames).
    """

    start: int
    rows: int
    close: int
    media_index: int
    """Which of the request's media this is."""
    facts: ItemFacts
    item_offset: int = 0

    @property
    def end(self) -> int:
        return self.start + self.rows

    @property
    def is_last(self) -> bool:
        """The medium's rows end here."""
        return self.item_offset + self.rows == self.facts.num_tokens


@dataclass(frozen=True, slots=True)
class Boundary:
    """A point inside a page up to which the prompt is worth finding again: `rows` from the start, its page-chain key.

    `media_key` is the media-chain key of the medium that closes there.
    """

    rows: int
    key: Digest
    media_key: Digest | None


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """token_ids int32 [n]; positions int32 [3, n] (time, height, width); position of a later row r is r + delta."""

    token_ids: npt.NDArray[np.int32] = field(repr=False)
    positions: npt.NDArray[np.int32] = field(repr=False)
    delta: int
    spans: tuple[MediaSpan, ...]
    seed: Digest = field(repr=False)
    page_keys: tuple[Digest, ...] = field(repr=False)
    """Keys of the full pages, in order; the chain's parent of page 0 is `seed`."""
    boundaries: tuple[Boundary, ...] = field(repr=False)
    """In order of rows; one at the closing token of every medium."""

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or self.positions.shape != (3, len(self.token_ids)):
            raise ValueError(f"ids {self.token_ids.shape} and positions {self.positions.shape} do not fit")

    def __len__(self) -> int:
        return len(self.token_ids)
