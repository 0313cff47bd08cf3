"""From pieces to rows: each placeholder of the template becomes as many rows as its medium has tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prism_server.errors import BadRequest
from prism_server.media.item import ItemFacts
from prism_server.media.messages import MediaContent
from prism_server.prompt.encoded import MediaSpan
from prism_server.prompt.tokenizer import MediaTokens

Run = npt.NDArray[np.int32] | int
"""Ids of plain text (int32 [k]), or one control token."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A prompt's rows: ids int32 [n], one span a picture, and for every span which media part (by order) it shows."""

    token_ids: npt.NDArray[np.int32] = field(repr=False)
    spans: tuple[MediaSpan, ...]
    parts: tuple[int, ...]


def assign(runs: Sequence[Run], media: Sequence[MediaContent], kind_of_pad: Mapping[int, str]) -> list[int]:
    """For each placeholder, in order, the index in `media` (the conversation's media parts, in order) of what it shows.

    Kinds are matched apart. BadRequest when the template shows more or fewer media of a kind than there are: nothing
    that a user sent is dropped silently.
    """
    shown = [kind_of_pad[run] for run in runs if isinstance(run, int) and run in kind_of_pad]
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


def expand(
    runs: Sequence[Run],
    order: Sequence[int],
    media: Sequence[MediaContent],
    facts: Sequence[ItemFacts],
    tokens: MediaTokens,
) -> Rows:
    """Puts `facts[i].num_tokens` rows where a placeholder stands; `order` is what `assign` returned."""
    chunks: list[npt.NDArray[np.int32]] = []
    spans: list[MediaSpan] = []
    row, placed = 0, iter(order)
    for i, run in enumerate(runs):
        if not isinstance(run, int):
            chunk = run
        elif run in tokens.kind_of_pad:
            index = media[next(placed)].media_index
            chunk = np.full(facts[index].num_tokens, run, dtype=np.int32)
            closed = i + 1 < len(runs) and _is_token(runs[i + 1], tokens.vision_end)
            spans.append(MediaSpan(row, len(chunk), row + len(chunk) + closed, index, facts[index]))
        else:
            chunk = np.asarray([run], dtype=np.int32)
        chunks.append(chunk)
        row += len(chunk)
    return Rows(np.concatenate(chunks) if chunks else np.empty(0, dtype=np.int32), tuple(spans), tuple(order))


def num_rows(
    runs: Sequence[Run], order: Sequence[int], media: Sequence[MediaContent], facts: Sequence[ItemFacts]
) -> int:
    """Length of the prompt that `expand` would make."""
    written = sum(1 if isinstance(run, int) else len(run) for run in runs)
    return written - len(order) + sum(facts[media[part].media_index].num_tokens for part in order)


def _is_token(run: Run, token_id: int) -> bool:
    return isinstance(run, int) and run == token_id
