"""`/v1/generate`: Prism's own endpoint. SSE events `accepted`, `token`, `done`, `error`, or one JSON object.

Greedy by default. `accepted` says what the cache will spare; `done` has what the request cost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from prism_server.engine.messages import (
    Accepted,
    Event,
    GenerateRequest,
    RequestFinished,
    SampleFinished,
    TokenDelta,
    TokenLogprob,
)
from prism_server.errors import PrismError
from prism_server.http.error_body import error_object
from prism_server.serving.answers import Collected, Sample, cost_fields, in_pieces
from prism_server.serving.early_media import EarlyMedia
from prism_server.serving.exchange import Exchange
from prism_server.serving.prepare import Draft
from prism_server.serving.schema import GenerateBody
from prism_server.serving.sse import frame

DEFAULT_TEMPERATURE = 0.0


async def generate(exchange: Exchange) -> None:
    """`POST /v1/generate`."""

    def build(fields: GenerateBody, early: EarlyMedia) -> tuple[bool, Draft]:
        preparer, arrival_s = exchange.running.preparer, exchange.arrival_s
        streams = fields.stream is not False
        if fields.messages is not None:
            return streams, preparer.chat(fields, fields.messages, early, DEFAULT_TEMPERATURE, arrival_s)
        assert fields.prompt is not None  # GenerateBody allows exactly one of the two
        return streams, preparer.text(fields, fields.prompt, DEFAULT_TEMPERATURE, arrival_s)

    streams, request = await exchange.prepared(GenerateBody, build)
    if streams:
        await exchange.send_stream(request, NativeStream(request))
    else:
        collected = await exchange.collect(request)
        await exchange.send_whole(collected, lambda: whole_answer(request.request_id, collected))


def whole_answer(request_id: str, collected: Collected) -> dict[str, Any]:
    """The answer in one piece: the `done` event with the texts in it."""
    return {
        "request_id": request_id,
        "samples": [
            {**sample_fields(sample), "text": sample.text, "token_ids": sample.token_ids}
            | ({"logprobs": logprob_fields(sample.logprobs)} if sample.logprobs else {})
            for sample in collected.samples
        ],
        "usage": asdict(collected.usage),
        "prism": cost_fields(collected.usage, collected.timings),
    }


def sample_fields(sample: Sample) -> dict[str, Any]:
    assert sample.finished is not None
    event = sample.finished
    return {"sample": event.sample, "finish_reason": event.reason, "stop_reason": event.stop_reason}


def logprob_fields(logprobs: Sequence[TokenLogprob]) -> list[msgspec.Raw]:
    return in_pieces(
        {
            "token_id": item.token_id,
            "logprob": item.logprob,
            "top": [{"token_id": token_id, "logprob": logprob} for token_id, logprob in item.top],
        }
        for item in logprobs
    )


class NativeStream:
    """A `StreamWriter` of the native events."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request_id = request.request_id
        self._samples = [Sample() for _ in range(request.params.n)]

    def frames(self, event: Event) -> bytes:
        match event:
            case Accepted(usage=usage):
                return frame({"request_id": self._request_id, "usage": asdict(usage)}, "accepted")
            case TokenDelta():
                data: dict[str, Any] = {"sample": event.sample, "token_ids": event.token_ids, "text": event.text}
                if event.logprobs:
                    data["logprobs"] = logprob_fields(event.logprobs)
                return frame(data, "token")
            case SampleFinished(sample=i):
                self._samples[i].finished = event
                return b""
            case RequestFinished(usage=usage, timings=timings):
                done = {
                    "request_id": self._request_id,
                    "samples": list(map(sample_fields, self._samples)),
                    "usage": asdict(usage),
                    "prism": cost_fields(usage, timings),
                }
                return frame(done, "done")
            case _:
                return b""

    def failure(self, error: PrismError) -> bytes:
        return frame(error_object(error), "error")
