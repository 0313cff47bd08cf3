"""What a step's kernels read: ids, positions, places in the KV pages, attention metadata; at fixed addresses.

The host fills one packet with numpy; the device derives nothing but the ids of decode rows. A step may be padded to a
size with more room: rows that are stored nowhere, sequences without rows, draws that nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prism_server.engine.packet import Packet, Section, Words, aligned
from prism_server.engine.plan import PageAssignment, SequenceRows
from prism_server.ops.interface import AttentionBatch


@dataclass(frozen=True, slots=True, order=True)
class StepSize:
    """Room for so many rows, sequences and draws. `each_row_draws`: rows, sequences and draws are the same; `media`:
    rows may show media; `greedy`: the likeliest tokens are all that is asked for, and the FP8 head finds them."""

    rows: int
    sequences: int
    draws: int
    each_row_draws: bool = False
    media: bool = False
    greedy: bool = False

    @classmethod
    def of(cls, sequences: tuple[SequenceRows, ...], media: bool = False, greedy: bool = False) -> StepSize:
        rows = sum(part.count for part in sequences)
        draws = sum(part.draw is not None for part in sequences)
        return cls(rows, len(sequences), draws, rows == len(sequences) == draws and not media, media, greedy)


class StepLayout:
    """Where the arrays of a step of one size lie in its packet."""

    def __init__(self, size: StepSize) -> None:
        self.size = size
        self.num_words = 0
        rows, sequences, draws = size.rows, size.sequences, size.draws
        self.token_ids = self._place("int64", rows)  # the first: see DeviceSlots.memory
        self.sources = self._place("int64", rows)
        self.positions = self._place("int64", 3, rows)
        self.page_index = self._place("int64", rows)
        self.slot_index = self._place("int64", rows)
        self.draw_rows = self._place("int64", draws)
        self.draw_slots = self._place("int64", draws)
        self.query_starts = self._place("int32", sequences + 1)
        self.context_lengths = self._place("int32", sequences)
        self.table_rows = self._place("int32", sequences)

    def _place(self, dtype: str, *shape: int) -> Section:
        section = Section(self.num_words, shape, dtype)
        self.num_words = section.end
        return section


@dataclass(frozen=True, eq=False, slots=True)
class StepInputs:
    """A step's numbers on the device."""

    sources: Tensor = field(repr=False)
    """int64 [T]: where in DeviceSlots.memory each row's token id is."""
    positions: Tensor = field(repr=False)
    """int64 [3, T]"""
    batch: AttentionBatch = field(repr=False)
    draw_rows: Tensor | None = field(repr=False)
    """int64 [D]: rows after which a token is drawn; None where that is every row, in order."""
    draw_slots: Tensor = field(repr=False)
    """int64 [D]: the slots that the tokens go to."""


class DeviceSlots:
    """What the device keeps of every slot: last token and block table (of the tables the host has a copy), and the
    packet's words right behind the tokens, so that one gather finds the ids of decode rows and of all others."""

    def __init__(self, num_slots: int, max_pages_per_sequence: int, packet_words: int, device: torch.device) -> None:
        self.device = device
        self.nobody = num_slots
        """The slot that padding writes to."""
        self._zero = num_slots + 1
        """A word of `memory` that stays 0: the id of padding rows."""
        self._first_word = aligned(num_slots + 2)
        self.memory = torch.zeros(self._first_word + aligned(packet_words), dtype=torch.int64, device=device)
        self.last_tokens = self.memory[: num_slots + 1]
        shape = (num_slots + 1, max_pages_per_sequence)
        self.block_tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._host_tables = np.zeros(shape, dtype=np.int32)
        self.packet = Packet(self.memory[self._first_word :])

    def append_pages(self, pages: tuple[PageAssignment, ...]) -> tuple[Section, Section] | None:
        """Note a plan's assignments, and put what changes into the packet; later ones of one place win."""
        if not pages:
            return None
        slots, indices, numbers = np.array([(one.slot, one.index, one.page) for one in pages], dtype=np.int64).T
        self._host_tables[slots, indices] = numbers
        places = np.unique(slots * self._host_tables.shape[1] + indices)
        return self.packet.append(places), self.packet.append(self._host_tables.reshape(-1)[places])

    def assign_pages(self, sections: tuple[Section, Section]) -> None:
        """On the device, after the packet was sent."""
        places, pages = (self.packet.tensor(section) for section in sections)
        self.block_tables.view(-1).index_copy_(0, places, pages)

    def write_rows(
        self, layout: StepLayout, sequences: tuple[SequenceRows, ...], page_tokens: int, words: Words
    ) -> None:
        """Fill a packet's first words for the rows of `sequences`, padded to the layout's size.

        The plan's page assignments are noted already.
        """
        parts = [(part.slot, part.start, part.count) for part in sequences]
        slots, starts, counts = np.array(parts, dtype=np.int64).reshape(-1, 3).T
        ends = np.cumsum(counts)
        num_rows = int(counts.sum())
        numbers = np.arange(num_rows) + np.repeat(starts - ends + counts, counts)
        _fill(layout.page_index, words, self._host_tables[np.repeat(slots, counts), numbers // page_tokens], -1)
        _fill(layout.slot_index, words, numbers % page_tokens, 0)
        self._write_ids(layout, sequences, ends, num_rows, words)
        _fill(layout.query_starts, words, np.concatenate(([0], ends)), num_rows)
        _fill(layout.context_lengths, words, starts + counts, 0)
        _fill(layout.table_rows, words, slots, self.nobody)
        drawing = np.array([part.draw is not None for part in sequences], dtype=bool)
        _fill(layout.draw_rows, words, ends[drawing] - 1, 0)
        _fill(layout.draw_slots, words, slots[drawing], self.nobody)

    def _write_ids(
        self,
        layout: StepLayout,
        sequences: tuple[SequenceRows, ...],
        ends: npt.NDArray[np.int64],
        num_rows: int,
        words: Words,
    ) -> None:
        """Ids, or the slots that have them, and positions."""
        _fill(layout.sources, words, self._first_word + np.arange(num_rows), self._zero)
        ids, sources = layout.token_ids.on_host(words), layout.sources.on_host(words)
        for part, end in zip(sequences, ends.tolist(), strict=True):
            if part.token_ids is None:
                sources[end - 1] = part.slot
            else:
                ids[end - part.count : end] = part.token_ids
        positions = layout.positions.on_host(words)
        positions[:, num_rows:] = 0
        if sequences:
            np.concatenate([part.positions for part in sequences], axis=1, out=positions[:, :num_rows])

    def inputs(self, layout: StepLayout, sequences: tuple[SequenceRows, ...] | None = None) -> StepInputs:
        """Views of the packet that was sent; exact with `sequences`, which also bound the grids, else for a graph."""
        packet, size = self.packet, layout.size
        most = 1 if size.each_row_draws else size.rows
        starts = contexts = None
        if sequences is not None:
            counts = [part.count for part in sequences]
            most = max(counts)
            starts = (0, *np.cumsum(counts).tolist())
            contexts = tuple(part.start + part.count for part in sequences)
        batch = AttentionBatch(
            packet.tensor(layout.query_starts),
            packet.tensor(layout.context_lengths),
            self.block_tables,
            packet.tensor(layout.table_rows),
            packet.tensor(layout.page_index),
            packet.tensor(layout.slot_index),
            most,
            starts,
            contexts,
        )
        return StepInputs(
            packet.tensor(layout.sources),
            packet.tensor(layout.positions),
            batch,
            None if size.each_row_draws else packet.tensor(layout.draw_rows),
            packet.tensor(layout.draw_slots),
        )


def _fill(section: Section, words: Words, values: npt.NDArray[Any], padding: int) -> None:
    target = section.on_host(words)
    target[: len(values)] = values
    target[len(values) :] = padding
