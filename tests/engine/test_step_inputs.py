"""A step's packet against a plain reference that walks row by row; padding, alignment, addresses."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from torch import Tensor

from prism_server.engine.packet import Packet
from prism_server.engine.plan import PageAssignment, SequenceRows
from prism_server.engine.runner import RunnerLimits
from prism_server.engine.step_inputs import DeviceSlots, StepInputs, StepLayout, StepSize

NUM_SLOTS, MAX_PAGES, PAGE_TOKENS = 6, 5, 4
LIMITS = RunnerLimits(NUM_SLOTS, MAX_PAGES, max_step_tokens=64)
LAST_TOKENS = list(range(100, 100 + NUM_SLOTS))


@dataclass
class Step:
    """Random rows for random slots, and the tables that they need."""

    rng: random.Random
    sequences: list[SequenceRows] = field(default_factory=list)
    pages: list[PageAssignment] = field(default_factory=list)
    tables: dict[tuple[int, int], int] = field(default_factory=dict)

    def add_all(self, decodes_only: bool = False) -> Step:
        for slot in self.rng.sample(range(NUM_SLOTS), self.rng.randint(1, NUM_SLOTS)):
            self.add(slot, decode=decodes_only or self.rng.random() < 0.5)
        return self

    def add(self, slot: int, decode: bool) -> None:
        count = 1 if decode else self.rng.randint(1, 7)
        start = self.rng.randint(0, MAX_PAGES * PAGE_TOKENS - count)
        for index in range(-(-(start + count) // PAGE_TOKENS)):
            for _ in range(self.rng.randint(1, 2)):  # assigned twice: the later page counts
                self.tables[slot, index] = self.rng.randrange(1000)
                self.pages.append(PageAssignment(slot, index, self.tables[slot, index]))
        ids = None if decode else self.numbers(count)
        positions = np.stack([self.numbers(count) for _ in range(3)])
        draw = self.rng.randint(0, 9) if decode or self.rng.random() < 0.5 else None
        self.sequences.append(SequenceRows(slot, start, count, ids, positions, draw))

    def numbers(self, count: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return np.array([self.rng.randrange(50) for _ in range(count)], dtype=np.int32)


def new_slots() -> DeviceSlots:
    slots = DeviceSlots(NUM_SLOTS, MAX_PAGES, LIMITS.packet_words, torch.device("cpu"))
    slots.last_tokens[:NUM_SLOTS] = torch.tensor(LAST_TOKENS)
    return slots


def send(slots: DeviceSlots, step: Step, size: StepSize | None) -> StepInputs:
    """As a runner does it; `size` None: exact."""
    sequences = tuple(step.sequences)
    layout = StepLayout(size or StepSize.of(sequences))
    words = slots.packet.begin(layout.num_words)
    words[:] = -77  # what an earlier step left there
    pages = slots.append_pages(tuple(step.pages))
    slots.write_rows(layout, sequences, PAGE_TOKENS, words)
    slots.packet.send()
    if pages is not None:
        slots.assign_pages(pages)
    return slots.inputs(layout, None if size else sequences)


def check(step: Step, inputs: StepInputs, slots: DeviceSlots) -> tuple[int, int, int]:
    """The rows of `step` are what they must be. Returns how many rows, sequences and draws they are."""
    batch, row, draws = inputs.batch, 0, []
    ids = slots.memory[inputs.sources].tolist()
    for number, part in enumerate(step.sequences):
        assert int(batch.table_rows[number]) == part.slot
        assert int(batch.query_starts[number]) == row
        assert int(batch.context_lengths[number]) == part.start + part.count
        for i in range(part.count):
            page, slot = divmod(part.start + i, PAGE_TOKENS)
            assert int(batch.page_index[row]) == step.tables[part.slot, page]
            assert int(batch.slot_index[row]) == slot
            assert ids[row] == (LAST_TOKENS[part.slot] if part.token_ids is None else part.token_ids[i])
            assert inputs.positions[:, row].tolist() == part.positions[:, i].tolist()
            row += 1
        if part.draw is not None:
            draws.append((row - 1, part.slot))
    assert int(batch.query_starts[len(step.sequences)]) == row
    for (slot, index), page in step.tables.items():
        assert int(slots.block_tables[slot, index]) == page
    rows = list(range(row)) if inputs.draw_rows is None else inputs.draw_rows.tolist()
    assert list(zip(rows[: len(draws)], inputs.draw_slots.tolist(), strict=False))[: len(draws)] == draws
    return row, len(step.sequences), len(draws)


@pytest.mark.parametrize("seed", range(30))
def test_an_exact_step_holds_its_rows_and_nothing_else(seed: int) -> None:
    slots, step = new_slots(), Step(random.Random(seed)).add_all()
    inputs = send(slots, step, None)
    rows, sequences, draws = check(step, inputs, slots)
    batch = inputs.batch
    assert (batch.num_rows, batch.num_sequences, len(inputs.draw_slots)) == (rows, sequences, draws)
    assert batch.host_query_starts == tuple(batch.query_starts.tolist())
    assert batch.host_context_lengths == tuple(batch.context_lengths.tolist())
    assert batch.max_query_rows == max(part.count for part in step.sequences)


@pytest.mark.parametrize("decodes_only", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_a_padded_step_holds_its_rows_and_padding_that_changes_nothing(seed: int, decodes_only: bool) -> None:
    rng = random.Random(seed)
    slots, step = new_slots(), Step(rng).add_all(decodes_only)
    size = StepSize(8, 8, 8, each_row_draws=True) if decodes_only else StepSize(64, 7, 7)
    inputs = send(slots, step, size)
    rows, sequences, draws = check(step, inputs, slots)
    batch = inputs.batch
    assert batch.page_index[rows:].eq(-1).all(), "rows of padding are stored nowhere"
    assert slots.memory[inputs.sources[rows:]].eq(0).all(), "the id of padding is in every vocabulary"
    assert batch.query_starts[sequences:].eq(rows).all()
    assert batch.context_lengths[sequences:].eq(0).all()
    assert batch.table_rows[sequences:].eq(NUM_SLOTS).all()
    assert inputs.draw_slots[draws:].eq(NUM_SLOTS).all(), "what padding draws goes to nobody's slot"
    assert inputs.draw_rows is None or inputs.draw_rows[draws:].eq(0).all()
    assert (batch.host_query_starts, batch.max_query_rows) == (None, 1 if decodes_only else 64)


def tensors_of(inputs: StepInputs) -> list[Tensor]:
    batch = inputs.batch
    found = [inputs.sources, inputs.positions, inputs.draw_slots, batch.query_starts, batch.context_lengths]
    return [*found, batch.table_rows, batch.page_index, batch.slot_index, batch.block_tables]


def test_captured_buffers_keep_their_addresses_whatever_the_steps_before_held() -> None:
    rng = random.Random(1)
    slots, size = new_slots(), StepSize(32, NUM_SLOTS, NUM_SLOTS)
    first = send(slots, Step(rng).add_all(), size)
    addresses = [tensor.data_ptr() for tensor in tensors_of(first)]
    for _ in range(10):
        step = Step(rng).add_all()
        exact = StepSize.of(tuple(step.sequences))
        send(slots, step, None if rng.random() < 0.5 or exact.rows > 32 else size)
    again = slots.inputs(StepLayout(size))
    assert [tensor.data_ptr() for tensor in tensors_of(again)] == addresses


@pytest.mark.parametrize("rows", [1, 3, 17, 63])
def test_every_array_of_every_size_is_aligned_alike_so_that_no_kernel_is_compiled_again(rows: int) -> None:
    slots = new_slots()
    inputs = slots.inputs(StepLayout(StepSize(rows, min(rows, 5), min(rows, 5))))
    for tensor in tensors_of(inputs)[:-1]:
        assert (tensor.data_ptr() - slots.memory.data_ptr()) % 128 == 0


def test_later_steps_see_the_pages_that_earlier_ones_assigned() -> None:
    slots, rng = new_slots(), random.Random(2)
    first = Step(rng)
    first.add(2, decode=False)
    send(slots, first, None)
    later = Step(rng, tables=first.tables)
    later.sequences.append(SequenceRows(2, 0, 1, None, np.zeros((3, 1), dtype=np.int32), 1))
    check(later, send(slots, later, None), slots)


def test_the_largest_step_with_everything_in_it_fits_into_the_packet() -> None:
    slots = new_slots()
    layout = StepLayout(StepSize(LIMITS.max_step_tokens, NUM_SLOTS, NUM_SLOTS))
    slots.packet.begin(layout.num_words)
    everywhere = [PageAssignment(slot, index, 1) for slot in range(NUM_SLOTS) for index in range(MAX_PAGES)]
    slots.append_pages(tuple(everywhere))
    slots.packet.append(np.arange(LIMITS.max_step_tokens))  # picture rows
    for width in (1, 1, 1, 3, 1, 5):  # the sampler's
        slots.packet.append(np.ones((NUM_SLOTS, width), dtype=np.float64))


def test_a_packet_gives_back_what_was_put_in_and_refuses_what_does_not_fit() -> None:
    packet = Packet(torch.zeros(64, dtype=torch.int64))
    for turn in range(5):
        packet.begin(16)[:] = turn
        arrays = [np.arange(3, dtype=np.int32) + turn, np.array([[0.5, turn]]), np.zeros(0, dtype=np.int64)]
        sections = [packet.append(array) for array in arrays]
        packet.send()
        assert packet.words[:16].eq(turn).all()
        for array, section in zip(arrays, sections, strict=True):
            assert np.array_equal(packet.tensor(section).numpy(), array)
    with pytest.raises(ValueError, match="full"):
        packet.append(np.zeros(17, dtype=np.int64))
