"""What the scheduler tells the owner about sequences; the owner turns it into events."""

from __future__ import annotations

from dataclasses import dataclass

from prism_server.engine.messages import TokenLogprob
from prism_server.engine.sequence import Sequence
from prism_server.errors import PrismError


@dataclass(frozen=True, slots=True)
class Admitted:
    """The sequence got onto the device for the first time; its cached prefix is known."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Drawn:
    """The sequence has a new token."""

    sequence: Sequence
    token_id: int
    logprob: TokenLogprob | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The sequence ended: stop, length, cancelled, deadline; or with an error, which is its whole request's."""

    sequence: Sequence
    reason: str
    stop_reason: str | int | None = None
    """The stop string or token id that matched."""
    error: PrismError | None = None


Outcome = Admitted | Drawn | Finished
