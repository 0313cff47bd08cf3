"""Steps of known size, run before anything is served: to measure memory and to learn what work costs."""

from __future__ import annotations

from functools import partial
from itertools import count

import numpy as np

from prism_server.engine.cost_model import MAX_STEP_PATCHES, Observation
from prism_server.engine.messages import SamplingParams
from prism_server.engine.plan import (
    EncodeWork,
    MediaRows,
    PageAssignment,
    RowCopy,
    SequenceRows,
    SlotStart,
    StepPlan,
    StepResult,
)
from prism_server.engine.runner import Runner, RunnerLimits
from prism_server.identity import content_id
from prism_server.media.item import ItemKey, Patches

KEY = ItemKey(content_id("image", b"rehearsal"), content_id("layout", b"rehearsal"))
GREEDY = SamplingParams(max_tokens=1)
EVERYTHING = SamplingParams(max_tokens=1, temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20)
"""What takes the most memory of a sampler."""

TIMED_CHUNK_TOKENS = 512
"""About what fits beside decodes into a step's time: where the cost of a token matters."""
TIMED_ITEM_TOKENS = 1024


class Rehearsal:
    """Drives a runner with plans of its own. Pages and slots are written over; nothing of it stays."""

    def __init__(self, runner: Runner, limits: RunnerLimits, num_pages: int, page_tokens: int) -> None:
        self._runner, self._limits = runner, limits
        self._num_pages, self._page_tokens = num_pages, page_tokens
        self._vision = runner.model.config.vision
        self._steps = count(1)

    @property
    def patches_per_token(self) -> int:
        return self._vision.merge_size**2

    def encode(self, num_tokens: int) -> StepResult:
        """The whole tower for one item; its features stay until `forget`. What no picture has, a clip's frames have."""
        vision = self._vision
        frames = -(-num_tokens * self.patches_per_token // MAX_STEP_PATCHES)
        num_tokens = -(-num_tokens // frames) * frames
        grid = (frames, vision.merge_size, vision.merge_size * (num_tokens // frames))
        depth = vision.temporal_patch_size if frames > 1 else 1
        shape = (grid[0] * grid[1] * grid[2], vision.in_channels, depth, vision.patch_size, vision.patch_size)
        pixels = np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)
        self._runner.stage(KEY, self._runner.prepare(Patches(grid, pixels)))
        work = EncodeWork(KEY, grid, num_tokens, 0, vision.depth, finishes=True)
        return self._run(StepPlan(next(self._steps), encode=(work,)))

    def chunk(self, num_rows: int, media_tokens: int = 0) -> StepResult:
        """One sequence's prefill; with `media_tokens`, the size of the encoded item, all its rows are picture rows."""
        num_rows = min(num_rows, self._limits.max_pages_per_sequence * self._page_tokens)
        pages = -(-num_rows // self._page_tokens)
        starts = range(0, num_rows, media_tokens) if media_tokens else ()
        media = tuple(MediaRows(row, min(media_tokens, num_rows - row), KEY, 0) for row in starts)
        ids, positions = np.zeros(num_rows, dtype=np.int32), np.zeros((3, num_rows), dtype=np.int32)
        plan = StepPlan(
            next(self._steps),
            slot_starts=(SlotStart(0, GREEDY, 0, ids),),
            pages=tuple(PageAssignment(0, index, index % self._num_pages) for index in range(pages)),
            sequences=(SequenceRows(0, 0, num_rows, ids, positions, 0),),
            media=media,
        )
        return self._run(plan)

    def decode(self, num_sequences: int, params: SamplingParams = GREEDY) -> StepResult:
        """A row and a draw for each of so many sequences."""
        slots, positions = range(num_sequences), np.zeros((3, 1), dtype=np.int32)
        plan = StepPlan(
            next(self._steps),
            slot_starts=tuple(SlotStart(slot, params, 0, np.zeros(1, dtype=np.int32)) for slot in slots),
            pages=tuple(PageAssignment(slot, 0, slot % self._num_pages) for slot in slots),
            sequences=tuple(SequenceRows(slot, 0, 1, None, positions, 0) for slot in slots),
        )
        return self._run(plan)

    def move(self, num_host_slots: int) -> None:
        """Copy a row from page to page and, with a host tier, a page to the host and back: kernels are loaded."""
        if self._num_pages > 1:
            self._run(StepPlan(next(self._steps), row_copies=(RowCopy(0, 1, 1),)))
        if num_host_slots:
            self._run(StepPlan(next(self._steps), swap_out=((0, 0),)))
            self._run(StepPlan(next(self._steps), swap_in=((0, 0),)))

    def forget(self) -> None:
        """Drop the item's features."""
        self._run(StepPlan(next(self._steps), drop_features=(KEY,)))

    def largest_steps(self, item_tokens: int) -> None:
        """What takes the most memory of every kind; `item_tokens`: the most that the encoder does at once."""
        self.encode(item_tokens)
        self.chunk(self._limits.max_step_tokens, item_tokens)
        self.decode(self._limits.num_slots, EVERYTHING)
        self.forget()

    def observations(self, item_tokens: int) -> list[Observation]:
        """What a decode, a chunk and an item cost; each is run twice and the second time counts."""
        item_tokens = min(item_tokens, TIMED_ITEM_TOKENS)
        num_rows = min(TIMED_CHUNK_TOKENS, self._limits.max_step_tokens)
        steps = partial(self.decode, 1), partial(self.chunk, num_rows), partial(self.encode, item_tokens)
        decode, chunk, item = ([step() for _ in range(2)][1] for step in steps)
        self.forget()
        patch_blocks = item_tokens * self.patches_per_token * self._vision.depth
        return [
            Observation(1, 0, 0, decode.duration_ms, 0.0, decode.eager),
            Observation(0, num_rows, 0, chunk.duration_ms, 0.0, chunk.eager),
            Observation(0, 0, patch_blocks, 0.0, item.encode_ms, True),
        ]

    def _run(self, plan: StepPlan) -> StepResult:
        return self._runner.launch(plan).wait()
