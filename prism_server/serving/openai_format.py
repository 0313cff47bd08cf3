"""Events of the engine in OpenAI's shapes: whole answers and stream chunks, for chats and for completions. Pure."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
from prism_server.errors import PrismError
from prism_server.http.error_body import error_object
from prism_server.http.sse import DONE_FRAME
from prism_server.prompt.tokenizer import Tokenizer
from prism_server.serving.answers import Collected, Sample, cost_fields, in_pieces
from prism_server.serving.sse import frame

Json = dict[str, Any]


def finish_fields(event: SampleFinished) -> Json:
    """`finish_reason` in OpenAI's words; an answer cut by its deadline is `length`, with the stop reason beside it."""
    if event.reason in ("deadline", "cancelled"):
        return {"finish_reason": "length", "stop_reason": event.reason}
    return {"finish_reason": event.reason, "stop_reason": event.stop_reason}


def usage_fields(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """A token alone, for lists of logprobs; U+FFFD stands for part of a character."""
    return tokenizer.token_bytes(token_id).decode("utf-8", "replace")


def chat_logprobs(tokenizer: Tokenizer, logprobs: Iterable[TokenLogprob]) -> Json:
    def entry(token_id: int, logprob: float) -> Json:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": logprob, "bytes": list(raw)}

    return {
        "content": in_pieces(
            {**entry(item.token_id, item.logprob), "top_logprobs": [entry(*alternative) for alternative in item.top]}
            for item in logprobs
        )
    }


def completion_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob], offset: int) -> Json:
    """The older shape; `offset` is the length of the answer's text before these tokens."""
    tokens = [token_text(tokenizer, item.token_id) for item in logprobs]
    offsets: list[int] = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [item.logprob for item in logprobs],
        "top_logprobs": in_pieces({token_text(tokenizer, i): logprob for i, logprob in item.top} for item in logprobs),
        "text_offset": offsets,
    }


@dataclass(frozen=True)
class AnswerFormat(ABC):
    """The shape of one endpoint's answers. `ChatFormat` and `CompletionFormat` fill in what differs."""

    answer_id: str
    model: str
    tokenizer: Tokenizer
    wants_logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))

    object_name = ""
    chunk_name = ""

    def whole(self, collected: Collected) -> Json:
        choices = [self.choice(i, sample) for i, sample in enumerate(collected.samples)]
        return {
            **self.head(self.object_name),
            "choices": choices,
            "usage": usage_fields(collected.usage),
            "prism": cost_fields(collected.usage, collected.timings),
        }

    def head(self, name: str) -> Json:
        return {"id": self.answer_id, "object": name, "created": self.created, "model": self.model}

    @abstractmethod
    def choice(self, index: int, sample: Sample) -> Json:
        """A whole answer."""

    @abstractmethod
    def opening(self, index: int) -> Json | None:
        """The choice of a sample's first chunk, if the format has one."""

    @abstractmethod
    def delta(self, event: TokenDelta, offset: int) -> Json:
        """The choice of a chunk; `offset` is the length of the text before it."""

    @abstractmethod
    def closing(self, event: SampleFinished) -> Json:
        """The choice of a sample's last chunk."""


class ChatFormat(AnswerFormat):
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def choice(self, index: int, sample: Sample) -> Json:
        assert sample.finished is not None
        return {
            "index": index,
            "message": {"role": "assistant", "content": sample.text, "refusal": None},
            "logprobs": chat_logprobs(self.tokenizer, sample.logprobs) if self.wants_logprobs else None,
            **finish_fields(sample.finished),
        }

    def opening(self, index: int) -> Json | None:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, event: TokenDelta, offset: int) -> Json:
        logprobs = chat_logprobs(self.tokenizer, event.logprobs) if self.wants_logprobs else None
        return self._chunk(event.sample, {"content": event.text}, logprobs)

    def closing(self, event: SampleFinished) -> Json:
        return {**self._chunk(event.sample, {}), **finish_fields(event)}

    def _chunk(self, index: int, delta: Json, logprobs: Json | None = None) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}


class CompletionFormat(AnswerFormat):
    object_name = "text_completion"
    chunk_name = "text_completion"

    def choice(self, index: int, sample: Sample) -> Json:
        assert sample.finished is not None
        logprobs = completion_logprobs(self.tokenizer, sample.logprobs, 0) if self.wants_logprobs else None
        return {"index": index, "text": sample.text, "logprobs": logprobs, **finish_fields(sample.finished)}

    def opening(self, index: int) -> Json | None:
        return None

    def delta(self, event: TokenDelta, offset: int) -> Json:
        logprobs = completion_logprobs(self.tokenizer, event.logprobs, offset) if self.wants_logprobs else None
        return {"index": event.sample, "text": event.text, "logprobs": logprobs, "finish_reason": None}

    def closing(self, event: SampleFinished) -> Json:
        return {"index": event.sample, "text": "", "logprobs": None, **finish_fields(event)}


class OpenAIStream:
    """A `StreamWriter` of chunks; with `include_usage` every chunk has `usage`, null but in an extra last one."""

    def __init__(self, form: AnswerFormat, include_usage: bool) -> None:
        self._form = form
        self._head = form.head(form.chunk_name)
        self._include_usage = include_usage
        self._lengths: dict[int, int] = {}
        self._around_text: dict[int, tuple[bytes, bytes]] = {}
        """By sample: the bytes before and after the text of a chunk that has nothing else of its own."""

    def frames(self, event: Event) -> bytes:
        match event:
            case TokenDelta(sample=i, text=text):
                around = self._around_text.get(i)
                if around is None or event.logprobs:
                    return b"".join(map(self._chunk, self._delta_choices(event)))
                self._lengths[i] += len(text)
                return around[0] + msgspec.json.encode(text) + around[1]
            case SampleFinished(sample=i):
                return b"".join(map(self._chunk, (*self._openings(i), self._form.closing(event))))
            case RequestFinished(usage=usage, timings=timings):
                return (self._last_chunk(usage, timings) if self._include_usage else b"") + DONE_FRAME
            case _:
                return b""

    def failure(self, error: PrismError) -> bytes:
        return frame(error_object(error)) + DONE_FRAME

    def _openings(self, index: int) -> Iterator[Json]:
        if index not in self._lengths:
            self._lengths[index] = 0
            opening = self._form.opening(index)
            if opening is not None:
                yield opening

    def _delta_choices(self, event: TokenDelta) -> Iterator[Json]:
        yield from self._openings(event.sample)
        # Also where there is no text (part of a character, or what may begin a stop string): a token has a chunk, and
        # who reads the stream sees it move.
        yield self._form.delta(event, self._lengths[event.sample])
        self._lengths[event.sample] += len(event.text)
        if not event.logprobs:
            self._around_text[event.sample] = self._split_chunk(event.sample)

    def _split_chunk(self, index: int) -> tuple[bytes, bytes]:
        """A chunk of sample `index`, cut at the place of its text."""
        mark = secrets.token_hex(16)
        event = TokenDelta("", index, (), mark)
        before, _, after = self._chunk(self._form.delta(event, 0)).partition(msgspec.json.encode(mark))
        return before, after

    def _chunk(self, choice: Json) -> bytes:
        return frame({**self._head, "choices": [choice], **({"usage": None} if self._include_usage else {})})

    def _last_chunk(self, usage: Usage, timings: Timings) -> bytes:
        last = {"choices": [], "usage": usage_fields(usage), "prism": cost_fields(usage, timings)}
        return frame({**self._head, **last})
