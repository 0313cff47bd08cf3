"""One question and its answer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """`task` says what is asked for (color, total, read, ...), so that answers can be counted by kind."""

    task: str
    question: str
    answer: str


def distinct(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """The turns without a second asking of one question, in order."""
    return tuple({turn.question: turn for turn in turns}.values())
