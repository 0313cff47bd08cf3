"""From pieces to rows: each placeholder of the template becomes as many rows as its medium has tokens."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from prism_server.errors import BadRequest
from prism_server.media.item import ItemFacts
from prism_server.media.messages import MediaContent
from prism_server.prompt.encoded import MediaSpan
from prism_server.prompt.template import Piece
from prism_server.prompt.tokenizer import MediaTokens

VideoPrompt = Literal["nested", "flat"]
"""Where a clip's frames stand: inside the vision tokens of the template's placeholder, as transformers has it from 5.10
on, or in their place, as before."""


@dataclass(frozen=True, slots=True)
class FrameRows:
    """Rows that show a picture, or one temporal patch of a clip. `pad`: the id they have; `part`: the media part."""

    pad: int
    part: int
    media_index: int
    facts: ItemFacts
    offset: int
    """Of its first row in the item's rows."""
    rows: int


Laid = Piece | FrameRows
"""A run of plain text, one control token, or the rows of a frame."""
Run = npt.NDArray[np.int32] | int | FrameRows
"""The same with text as ids, int32 [k]."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A prompt's rows: ids int32 [n], one span a frame, and for every span which media part (by order) it shows."""

    token_ids: npt.NDArray[np.int32] = field(repr=False)
    spans: tuple[MediaSpan, ...]
    parts: tuple[int, ...]


def assign(pieces: Sequence[Piece], media: Sequence[MediaContent], kind_of_pad: Mapping[int, str]) -> list[int]:
    """For each placeholder, in order, the index in `media` (the conversation's media parts, in order) of what it shows.

    Kinds are matched apart. BadRequest when the template shows more or fewer media of a kind than there are: nothing
    that a user sent is dropped silently.
    """
    shown = [kind_of_pad[piece] for piece in pieces if isinstance(piece, int) and piece in kind_of_pad]
    parts_of_kind: dict[str, list[int]] = {kind: [] for kind in kind_of_pad.values()}
    for index, content in enumerate(media):
        if content.kind not in parts_of_kind:
            raise BadRequest(f"media of kind {content.kind!r} have no place in the prompt", param="messages")
        parts_of_kind[content.kind].append(index)
    for kind, indices in parts_of_kind.items():
        if shown.count(kind) != len(indices):
            raise BadRequest(
                f"the chat template shows {shown.count(kind)} of the request's {len(indices)} {kind} parts; "
                "media may not be allowed in a message of this role",
                param="messages",
            )
    in_order = {kind: iter(indices) for kind, indices in parts_of_kind.items()}
    return [next(in_order[kind]) for kind in shown]


def lay_out(
    pieces: Sequence[Piece],
    order: Sequence[int],
    media: Sequence[MediaContent],
    facts: Sequence[ItemFacts],
    tokens: MediaTokens,
    video_prompt: VideoPrompt = "nested",
) -> list[Laid]:
    """The pieces with rows where placeholders stand; `order` is what `assign` returned. Texts are never adjacent.

    A clip becomes, for each temporal patch, the text of its time and rows between vision tokens of their own
    (`Qwen3VLProcessor.replace_video_token`).
    """
    laid: list[Laid] = []
    placed = iter(order)
    opened_flat = False
    for piece in pieces:
        if opened_flat and piece == tokens.vision_end:
            opened_flat = False
        elif isinstance(piece, int) and piece in tokens.kind_of_pad:
            part = next(placed)
            shown = facts[media[part].media_index]
            frames = _frames(piece, part, media[part].media_index, shown)
            if shown.clip is None:
                laid += frames
                continue
            opened_flat = video_prompt == "flat" and laid[-1:] == [tokens.vision_start]
            if opened_flat:
                laid.pop()
            for time_s, frame in zip(shown.clip.pair_times_s.tolist(), frames, strict=True):
                laid += [f"<{time_s:.1f} seconds>", tokens.vision_start, frame, tokens.vision_end]
        else:
            opened_flat = False
            laid.append(piece)
    return list(_joined(laid))


def _frames(pad: int, part: int, media_index: int, facts: ItemFacts) -> Iterator[FrameRows]:
    rows = facts.num_tokens // facts.grid[0]
    for number in range(facts.grid[0]):
        yield FrameRows(pad, part, media_index, facts, number * rows, rows)


def _joined(laid: Iterable[Laid]) -> Iterator[Laid]:
    """Adjacent texts as one: they are encoded together, as the reference's rendered prompt is."""
    text = ""
    for piece in laid:
        if isinstance(piece, str):
            text += piece
            continue
        if text:
            yield text
            text = ""
        yield piece
    if text:
        yield text


def expand(runs: Sequence[Run], tokens: MediaTokens) -> Rows:
    """Ids and spans of all rows. A medium closes with the vision tokens after its last rows."""
    chunks: list[npt.NDArray[np.int32]] = []
    spans: list[MediaSpan] = []
    row = 0
    for i, run in enumerate(runs):
        if isinstance(run, FrameRows):
            chunk = np.full(run.rows, run.pad, dtype=np.int32)
            close = row + run.rows
            after = i + 1
            while after < len(runs) and _is_token(runs[after], tokens.vision_end):
                close, after = close + 1, after + 1
            spans.append(MediaSpan(row, run.rows, close, run.media_index, run.facts, run.offset))
        else:
            chunk = np.asarray([run], dtype=np.int32) if isinstance(run, int) else run
        chunks.append(chunk)
        row += len(chunk)
    parts = tuple(run.part for run in runs if isinstance(run, FrameRows))
    return Rows(np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int32), tuple(spans), parts)


def num_rows(runs: Iterable[Run]) -> int:
    """Length of the prompt that `expand` would make."""
    return sum(run.rows if isinstance(run, FrameRows) else 1 if isinstance(run, int) else len(run) for run in runs)


def _is_token(run: Run, token_id: int) -> bool:
    return isinstance(run, int) and run == token_id
