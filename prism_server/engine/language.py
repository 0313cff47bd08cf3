"""The language side of a step: from its inputs to logits and each drawing row's likeliest token. Graphs capture it."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from prism_server.engine.step_inputs import DeviceSlots, StepInputs
from prism_server.model.qwen3_vl import Qwen3VL
from prism_server.model.text import FeatureRows, MediaCanvas
from prism_server.ops.kv_storage import PagedKV


@dataclass(frozen=True, eq=False, slots=True)
class StepOutput:
    """Of a step's D draws. A graph's output lies at the same addresses after every replay."""

    logits: Tensor | None = field(repr=False)
    """float32 [D, vocabulary]; None of a greedy step that was done without them."""
    tokens: Tensor = field(repr=False)
    """int64 [D]: the likeliest, also written to the slots."""


class LanguageStep:
    """One forward pass, then tokens into their slots: a fixed number of kernels that reads device memory only."""

    def __init__(self, model: Qwen3VL, kv: PagedKV, slots: DeviceSlots) -> None:
        self._model, self._kv, self._slots = model, kv, slots
        self._canvas: MediaCanvas | None = None

    def canvas(self, num_rows: int) -> MediaCanvas:
        """Where a padded step of `num_rows` rows finds the features of its media. Graphs are captured largest first:
        the canvas never grows under one."""
        if self._canvas is None or self._canvas.shown.shape[0] < num_rows:
            config = self._model.config
            num_levels = 1 + len(config.vision.deepstack_blocks)
            self._canvas = MediaCanvas.empty(
                num_rows, num_levels, config.text.hidden_size, self._model.dtype, self._model.device
            )
        return self._canvas.window(num_rows)

    def __call__(
        self, inputs: StepInputs, media: FeatureRows | MediaCanvas | None = None, greedy: bool = False
    ) -> StepOutput | None:
        """None for a step that draws nothing. `greedy`: without logits, by the FP8 head."""
        slots, text = self._slots, self._model.text
        token_ids = slots.memory.index_select(0, inputs.sources)
        hidden = text.forward(token_ids, inputs.positions, self._kv, inputs.batch, media)
        if inputs.draw_slots.shape[0] == 0:
            return None
        drawing = hidden if inputs.draw_rows is None else hidden.index_select(0, inputs.draw_rows)
        logits = None if greedy else text.logits(drawing)
        tokens = text.best_tokens(drawing) if logits is None else self._model.ops.argmax(logits)
        slots.last_tokens.index_copy_(0, inputs.draw_slots, tokens)
        return StepOutput(logits, tokens)
