"""A step plan while it is being made, and the record that its completion needs."""

from __future__ import annotations

from dataclasses import dataclass, field

from prism_server.engine.plan import (
    EncodeWork,
    MediaRows,
    PageAssignment,
    RowCopy,
    SequenceRows,
    SlotStart,
    StepPlan,
)
from prism_server.engine.sequence import Sequence
from prism_server.media.item import ItemKey


@dataclass(frozen=True, slots=True)
class LaunchedRows:
    """What a launched plan does for one sequence: it computes rows up to `end`, and draws a token or not."""

    sequence: Sequence
    incarnation: int
    start: int
    end: int
    draws: bool
    items: tuple[ItemKey, ...]


@dataclass(slots=True)
class PlanBuilder:
    """Collects one step's parts."""

    step: int
    slot_starts: list[SlotStart] = field(default_factory=list)
    pages: list[PageAssignment] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    row_copies: list[RowCopy] = field(default_factory=list)
    encode: list[EncodeWork] = field(default_factory=list)
    encodes_for: set[Sequence] = field(default_factory=set)
    rows: list[SequenceRows] = field(default_factory=list)
    media: list[MediaRows] = field(default_factory=list)
    launched: list[LaunchedRows] = field(default_factory=list)
    planned: set[int] = field(default_factory=set)
    """Numbers of the sequences that are in the plan: they cannot be preempted any more."""
    unpins: list[tuple[ItemKey, int]] = field(default_factory=list)
    """Pins that end with this plan; released after it is built, so that nothing in it evicts what it reads."""
    short_of_pages: bool = False
    """A running sequence found too few: whoever waits does not get them first."""
    num_tokens: int = 0
    num_decodes: int = 0

    @property
    def computes(self) -> bool:
        """Whether the plan computes a token, or an encoder block."""
        return bool(self.rows or self.encode)

    @property
    def is_empty(self) -> bool:
        """Whether the plan changes nothing on the device."""
        return not (self.computes or self.slot_starts or self.pages or self.swap_in or self.row_copies)

    def assign_page(self, sequence: Sequence, page: int) -> None:
        """Append `page` to the sequence's table."""
        assert sequence.slot is not None
        self.pages.append(PageAssignment(sequence.slot, len(sequence.table), page))
        sequence.table.append(page)

    def add_rows(self, sequence: Sequence, end: int, draws: bool) -> None:
        """Known rows [num_planned, end) of the sequence, their media, and a token drawn after the last when `draws`."""
        assert sequence.slot is not None
        self.pages += [PageAssignment(sequence.slot, index, page) for index, page in sequence.moved]
        sequence.moved.clear()
        start = sequence.num_planned
        ids = sequence.ids(start, end)
        items = self._add_media(sequence, start, end)
        draw = sequence.num_drawn if draws else None
        self.rows.append(SequenceRows(sequence.slot, start, end - start, ids, sequence.positions(start, end), draw))
        self.launched.append(LaunchedRows(sequence, sequence.incarnation, start, end, draws, items))
        self.planned.add(sequence.number)
        self.num_tokens += end - start
        sequence.num_planned = end
        sequence.last_step = self.step
        if draws:
            sequence.num_drawn += 1

    def add_decode(self, sequence: Sequence) -> None:
        """The row of the sequence's last token, and the token drawn after it. What most steps consist of."""
        assert sequence.slot is not None
        if sequence.moved:
            self.pages += [PageAssignment(sequence.slot, index, page) for index, page in sequence.moved]
            sequence.moved.clear()
        start = sequence.num_planned
        end = start + 1
        positions = sequence.positions(start, end)
        self.rows.append(SequenceRows(sequence.slot, start, 1, None, positions, sequence.num_drawn))
        self.launched.append(LaunchedRows(sequence, sequence.incarnation, start, end, True, ()))
        self.planned.add(sequence.number)
        self.num_tokens += 1
        self.num_decodes += 1
        sequence.num_planned = end
        sequence.num_drawn += 1
        sequence.last_step = self.step

    def _add_media(self, sequence: Sequence, start: int, end: int) -> tuple[ItemKey, ...]:
        items: dict[ItemKey, None] = {}
        for span in sequence.spans:
            first, last = max(span.start, start), min(span.end, end)
            if first < last:
                row = self.num_tokens + first - start
                offset = span.item_offset + first - span.start
                self.media.append(MediaRows(row, last - first, span.facts.key, offset))
                items[span.facts.key] = None
        return tuple(items)

    def build(self, drop_features: tuple[ItemKey, ...], drop_staged: tuple[ItemKey, ...]) -> StepPlan:
        return StepPlan(
            self.step,
            tuple(self.slot_starts),
            tuple(self.pages),
            tuple(self.swap_in),
            tuple(self.swap_out),
            tuple(self.row_copies),
            tuple(self.encode),
            tuple(self.rows),
            tuple(self.media),
            drop_features,
            drop_staged,
        )
