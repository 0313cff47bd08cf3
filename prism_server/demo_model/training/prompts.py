"""Conversations to rows of tokens of a layout's length, with what is to be predicted after each."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from prism_server.demo_model.clips import draw_clip
from prism_server.demo_model.layouts import Layout
from prism_server.demo_model.turns import Turn
from prism_server.prompt.positions import frame_cells
from prism_server.prompt.tokenizer import Tokenizer

SYSTEM_PROMPT = "You are a helpful assistant."
NOTHING_ASKED = -100
"""The target where no answer's token follows."""

Ints = npt.NDArray[np.int64]


def row_length(layout: Layout) -> int:
    """Tokens of every row of the layout."""
    return layout.vision_tokens + layout.text_tokens


@dataclass(frozen=True, eq=False, slots=True)
class Opening:
    """What all rows of a layout begin with: the media, up to the first question."""

    ids: Ints = field(repr=False)
    media_rows: Ints = field(repr=False)
    """[vision tokens]: the rows that features go to."""
    positions: Ints = field(repr=False)
    """[3, row_length]: text goes on counting after the media."""


@dataclass(frozen=True, eq=False, slots=True)
class Row:
    """A conversation. `turn_of` says which turn's answer a target belongs to, -1 where nothing is asked."""

    ids: Ints = field(repr=False)
    targets: Ints = field(repr=False)
    turn_of: Ints = field(repr=False)
    num_turns: int


class PromptWriter:
    """Writes as the checkpoint's chat template does, one user and one assistant message a turn."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = tokenizer = Tokenizer.load(directory)
        added = tokenizer.added_tokens
        self._start, self._end = added["<|im_start|>"], added["<|im_end|>"]
        self._pad = added[tokenizer.named_tokens["pad_token"]]
        self.opening = functools.cache(self._opening)

    def row(self, layout: Layout, with_system: bool, turns: Sequence[Turn]) -> Row:
        """As many of the turns, in order, as there is room for. ValueError if there is none for the first."""
        length = row_length(layout)
        ids, targets = np.full(length, self._pad, np.int64), np.full(length, NOTHING_ASKED, np.int64)
        turn_of = np.full(length, -1, np.int64)
        opening = self.opening(layout, with_system).ids
        at = len(opening)
        ids[:at] = opening
        for number, turn in enumerate(turns):
            asked = self._question(turn.question, first=number == 0)
            answered = [*self._text(turn.answer), self._end]
            start, end = at + len(asked), at + len(asked) + len(answered)
            if end > length:
                if number == 0:
                    raise ValueError(f"{layout.name} has no room for {turn.question!r}")
                return Row(ids, targets, turn_of, number)
            ids[at:start], ids[start:end] = asked, answered
            targets[start - 1 : end - 1], turn_of[start - 1 : end - 1] = answered, number
            at = end
        return Row(ids, targets, turn_of, len(turns))

    def _opening(self, layout: Layout, with_system: bool) -> Opening:
        system = self._message("system", SYSTEM_PROMPT) + self._text("\n") if with_system else []
        ids = [*system, self._start, *self._text("user\n")]
        media = self._tokenizer.media_tokens
        positions = np.empty((3, row_length(layout)), np.int64)
        rows: list[int] = []
        filled, position = 0, 0
        times_s = draw_clip(random.Random(0), layout.slots).times_s if layout.kind == "clip" else ()
        for number, slot in enumerate(layout.slots):
            if times_s:
                ids += self._text(f"<{times_s[number]:.1f} seconds>")
            ids.append(media.vision_start)
            start, end = len(ids), len(ids) + slot.num_tokens
            position += start - filled
            positions[:, filled:start] = np.arange(position - (start - filled), position)
            positions[:, start:end] = position + frame_cells(slot.rows, slot.columns)
            filled, position = end, position + max(slot.rows, slot.columns)
            rows += range(start, end)
            ids += [media.video_pad if times_s else media.image_pad] * slot.num_tokens
            ids.append(media.vision_end)
        positions[:, filled:] = np.arange(position, position + positions.shape[1] - filled)
        return Opening(np.array(ids, np.int64), np.array(rows, np.int64), positions)

    def _question(self, question: str, first: bool) -> list[int]:
        """From a user's words to where the answer begins."""
        before = [] if first else [*self._text("\n"), self._start, *self._text("user\n")]
        return [*before, *self._text(question), self._end, *self._text("\n"), self._start, *self._text("assistant\n")]

    def _message(self, role: str, text: str) -> list[int]:
        return [self._start, *self._text(f"{role}\n"), *self._text(text), self._end]

    def _text(self, text: str) -> list[int]:
        (ids,) = self._tokenizer.encode_runs([text])
        return [int(token) for token in ids]
