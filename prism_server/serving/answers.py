"""A request's events put together into its answers, whatever the wire format. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from prism_server.engine.messages import (
    Event,
    RequestFinished,
    SampleFinished,
    Timings,
    TokenDelta,
    TokenLogprob,
    Usage,
)


@dataclass
class Sample:
    """One answer as it grows."""

    pieces: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finished: SampleFinished | None = None

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass
class Collected:
    """All that the events of one request said."""

    samples: list[Sample]
    usage: Usage = field(default_factory=lambda: Usage(0))
    timings: Timings = field(default_factory=Timings)

    @property
    def num_logprobs(self) -> int:
        """Tokens of which they are told."""
        return sum(len(sample.logprobs) for sample in self.samples)

    def take(self, event: Event) -> None:
        match event:
            case TokenDelta(sample=i, token_ids=token_ids, text=text, logprobs=logprobs):
                self.samples[i].pieces.append(text)
                self.samples[i].token_ids += token_ids
                self.samples[i].logprobs += logprobs
            case SampleFinished(sample=i):
                self.samples[i].finished = event
            case RequestFinished(usage=usage, timings=timings):
                self.usage, self.timings = usage, timings
            case _:
                pass


def cost_fields(usage: Usage, timings: Timings) -> dict[str, Any]:
    """Prism's extension of an answer: what the request cost, what it was spared, and where its time went (ms)."""
    costs = asdict(usage)
    del costs["prompt_tokens"], costs["completion_tokens"]
    costs["prefilled_text_tokens"] = usage.prefilled_tokens - usage.prefilled_media_tokens
    return {**costs, "timings": asdict(timings)}


def in_pieces(items: Iterable[Any]) -> list[msgspec.Raw]:
    """Each encoded on its own, and then let go of: together they may be a hundred times the answer's text, and one call
    that encodes megabytes lets nothing else run."""
    return [msgspec.Raw(msgspec.json.encode(item)) for item in items]
