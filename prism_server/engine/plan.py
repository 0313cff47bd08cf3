"""What one step does: an immutable, serialisable plan, and what comes back.

A plan carries no sampled ids: a decode row reads its token from the sequence's device slot, where sampling wrote it.
The executor applies a plan's parts in this order: slots, pages, swap-in, swap-out, row copies, drops, encoder, forward,
sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prism_server.engine.messages import SamplingParams, TokenLogprob
from prism_server.errors import PrismError
from prism_server.media.item import ItemKey


@dataclass(frozen=True, slots=True)
class SlotStart:
    """A sequence takes a device slot: how it samples, and what it has said (for penalties)."""

    slot: int
    params: SamplingParams
    seed: int
    prompt_ids: npt.NDArray[np.int32] = field(repr=False)
    output_ids: tuple[int, ...] = field(repr=False, default=())


@dataclass(frozen=True, slots=True)
class PageAssignment:
    """Page `page` becomes entry `index` of the slot's block table."""

    slot: int
    index: int
    page: int


@dataclass(frozen=True, slots=True)
class RowCopy:
    """Rows [0, rows) of page `source` go to `target`, payload and scales, in every layer."""

    source: int
    target: int
    rows: int


@dataclass(frozen=True, slots=True)
class EncodeWork:
    """Blocks [first_block, last_block) of the vision tower for one staged item; `finishes` stores its features."""

    key: ItemKey
    grid: tuple[int, int, int]
    num_tokens: int
    first_block: int
    last_block: int
    finishes: bool


@dataclass(frozen=True, slots=True)
class MediaRows:
    """Rows [row, row + count) of the step's batch show the item's feature rows from `offset`."""

    row: int
    count: int
    key: ItemKey
    offset: int


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """One sequence's rows in a step: rows [start, start + count) of the sequence.

    `token_ids` int32 [count], or None for a decode (count 1), which reads the slot. `positions` int32 [3, count].
    `draw`: None, or the index of the token that is sampled after the last row (0 for the first output).
    """

    slot: int
    start: int
    count: int
    token_ids: npt.NDArray[np.int32] | None = field(repr=False)
    positions: npt.NDArray[np.int32] = field(repr=False)
    draw: int | None

    def __post_init__(self) -> None:
        if self.count < 1 or self.positions.shape != (3, self.count):
            raise ValueError(f"{self.count} rows cannot have positions {self.positions.shape}")
        if (self.token_ids is None and self.count != 1) or (
            self.token_ids is not None and self.token_ids.shape != (self.count,)
        ):
            raise ValueError("ids are one per row, or None for a single decode row")


@dataclass(frozen=True, slots=True)
class StepPlan:
    """Everything that one step does. Steps are numbered from 1 and complete in order."""

    step: int
    slot_starts: tuple[SlotStart, ...] = ()
    pages: tuple[PageAssignment, ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()
    """(host slot, page)"""
    swap_out: tuple[tuple[int, int], ...] = ()
    """(page, host slot)"""
    row_copies: tuple[RowCopy, ...] = ()
    encode: tuple[EncodeWork, ...] = ()
    sequences: tuple[SequenceRows, ...] = ()
    media: tuple[MediaRows, ...] = ()
    drop_features: tuple[ItemKey, ...] = ()
    """Evicted before the encoder runs."""
    drop_staged: tuple[ItemKey, ...] = ()
    """Staged patches, or half-encoded items, that nobody needs any more; dropped before the encoder runs."""

    @property
    def num_tokens(self) -> int:
        return sum(rows.count for rows in self.sequences)

    def check(self) -> None:
        """Raise AssertionError unless every place is a destination at most once, no destination is a source, and no
        sequence has rows twice."""
        targets = [page for _, page in self.swap_in] + [copy.target for copy in self.row_copies]
        sources = {page for page, _ in self.swap_out} | {copy.source for copy in self.row_copies}
        host_targets = [slot for _, slot in self.swap_out]
        host_sources = {slot for slot, _ in self.swap_in}
        assert len(targets) == len(set(targets)), "a page is the destination of two copies"
        assert len(host_targets) == len(set(host_targets)), "a host slot is the destination of two copies"
        assert not sources & set(targets), "a copy's destination is another's source"
        assert not host_sources & set(host_targets), "a copy's host destination is another's source"
        assert len({rows.slot for rows in self.sequences}) == len(self.sequences), "a sequence has rows twice"


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gives back: for each drawing row, in the plan's order, a token (and its logprobs when asked for)."""

    step: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    failed_items: dict[ItemKey, PrismError] = field(default_factory=dict)
    """Items whose encoding failed; the requests whose rows showed them fail, alone."""
    duration_ms: float = 0.0
    encode_ms: float = 0.0
    eager: bool = False
    """Language rows ran outside a captured graph."""
