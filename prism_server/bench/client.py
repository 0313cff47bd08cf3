"""A small asynchronous client of the two streaming endpoints, with the times at which the answer's pieces came."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import httpx

from prism_server.engine.messages import Timings, Usage
from prism_server.errors import PrismError

Json = dict[str, Any]
OnText = Callable[[str], None]


class AnswerFailed(PrismError):
    """The server refused the request, broke off its stream, or cannot be reached."""

    kind = "answer_failed"


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer. Times are milliseconds since the request was sent, as the client saw them."""

    text: str
    finish_reason: str | None
    usage: Usage
    timings: Timings
    """As the engine saw them."""
    arrivals_ms: tuple[float, ...]
    """When each piece of text came."""
    total_ms: float

    @property
    def first_token_ms(self) -> float:
        return self.arrivals_ms[0] if self.arrivals_ms else self.total_ms


def user_message(pictures: Sequence[bytes], text: str) -> Json:
    """One user turn: PNG or JPEG files in order, as data URLs, and the text after them."""
    parts: list[Json] = [{"type": "image_url", "image_url": {"url": data_url(picture)}} for picture in pictures]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


def clip_message(frames: Sequence[bytes], fps: float, file: bytes | None, text: str) -> Json:
    """One user turn about one clip: the file, where there is one, else its frames as a list of PNG files."""
    part: Json = {"type": "video", "video": [data_url(frame) for frame in frames], "fps": fps}
    if file is not None:
        part = {"type": "video_url", "video_url": {"url": f"data:video/x-matroska;base64,{_base64(file)}"}}
    return {"role": "user", "content": [part, {"type": "text", "text": text}]}


def data_url(picture: bytes) -> str:
    subtype = "jpeg" if picture.startswith(b"\xff\xd8") else "png"
    return f"data:image/{subtype};base64,{_base64(picture)}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


class Client:
    """Keeps its connections: `async with Client(url) as client`. Every failure is an `AnswerFailed`."""

    def __init__(self, base_url: str, api_key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout_s, limits=limits)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        await self._http.aclose()

    async def chat(self, messages: Sequence[Json], on_text: OnText | None = None, **fields: Any) -> Answer:
        """`/v1/chat/completions`, greedy unless `fields` say otherwise; `on_text` is called with every piece."""
        body = {"messages": messages, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
        growing = _Growing(on_text)
        async for _, data in self._events("/v1/chat/completions", body | fields):
            if data != "[DONE]":
                growing.take_chunk(json.loads(data))
        return growing.answer()

    async def generate(self, messages: Sequence[Json], on_text: OnText | None = None, **fields: Any) -> Answer:
        """`/v1/generate`; the same otherwise."""
        growing = _Growing(on_text)
        async for name, data in self._events("/v1/generate", {"messages": messages} | fields):
            growing.take_event(name, json.loads(data))
        return growing.answer()

    async def model_name(self) -> str:
        """What `/v1/models` calls the model that is served."""
        try:
            response = await self._http.get("/v1/models")
        except httpx.TransportError as error:
            raise AnswerFailed(f"{self._http.base_url}: {error or type(error).__name__}") from error
        if response.is_error:
            raise AnswerFailed(refusal(response.status_code, response.content))
        return str(response.json()["data"][0]["id"])

    async def _events(self, path: str, body: Json) -> AsyncIterator[tuple[str, str]]:
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.is_error:
                    raise AnswerFailed(refusal(response.status_code, await response.aread()))
                async for event in server_sent_events(response.aiter_lines()):
                    yield event
        except httpx.TransportError as error:
            raise AnswerFailed(f"{self._http.base_url}: {error or type(error).__name__}") from error


async def server_sent_events(lines: AsyncIterator[str]) -> AsyncIterator[tuple[str, str]]:
    """(event name, data) of each event; an event without a name is a `message` (WHATWG HTML, 9.2)."""
    name, data = "message", list[str]()
    async for line in lines:
        key, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if key == "event":
            name = value
        elif key == "data":
            data.append(value)
        elif not line:
            if data:
                yield name, "\n".join(data)
            name, data = "message", []


def refusal(status: int, body: bytes) -> str:
    try:
        reason = json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):  # something between us and the server answered
        reason = body[:200].decode("utf-8", "replace")
    return f"HTTP {status}: {reason}"


@dataclass
class _Growing:
    """An answer while it streams in."""

    on_text: OnText | None
    started_s: float = field(default_factory=time.monotonic)
    pieces: list[str] = field(default_factory=list)
    arrivals_ms: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    usage: Usage | None = None
    timings: Timings = field(default_factory=Timings)

    def take_chunk(self, chunk: Json) -> None:
        """A chunk of `/v1/chat/completions`."""
        if "error" in chunk:
            raise AnswerFailed(chunk["error"]["message"])
        for choice in chunk["choices"]:
            self._text(choice["delta"].get("content") or "")
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if chunk.get("usage"):
            usage = chunk["usage"]
            self._costs(chunk["prism"] | {name: usage[name] for name in ("prompt_tokens", "completion_tokens")})

    def take_event(self, name: str, data: Json) -> None:
        """An event of `/v1/generate`."""
        if name == "error":
            raise AnswerFailed(data["error"]["message"])
        if name == "token":
            self._text(data["text"])
        elif name == "done":
            self.finish_reason = data["samples"][0]["finish_reason"]
            self._costs(data["prism"] | data["usage"])

    def answer(self) -> Answer:
        if self.usage is None:
            raise AnswerFailed("the stream ended before the answer did")
        total_ms = self._now_ms()
        arrivals_ms = tuple(self.arrivals_ms)
        return Answer("".join(self.pieces), self.finish_reason, self.usage, self.timings, arrivals_ms, total_ms)

    def _text(self, text: str) -> None:
        if text:
            self.pieces.append(text)
            self.arrivals_ms.append(self._now_ms())
            if self.on_text:
                self.on_text(text)

    def _costs(self, costs: Json) -> None:
        self.timings = Timings(**costs["timings"])
        self.usage = Usage(**{name: costs[name] for name in Usage.__dataclass_fields__})

    def _now_ms(self) -> float:
        return 1e3 * (time.monotonic() - self.started_s)
