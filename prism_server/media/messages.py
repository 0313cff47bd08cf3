"""What a request says: turns with text and media apart, every part checked where it stands. Router and engine read alike.

Media are still as the request spelled them; nothing is decoded or fetched here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prism_server.errors import BadRequest
from prism_server.identity import ChainPart, Digest, MediaOptions, MediaPart, TextPart
from prism_server.media.limits import MediaLimits

ROLES = ("system", "user", "assistant", "tool")
SPOKEN_ROLES: Mapping[str, str] = {role: role for role in ROLES} | {"developer": "system"}
"""Roles as requests say them; `developer` is OpenAI's newer name of `system`."""
TEMPLATE_FIELDS = ("tool_calls", "reasoning_content")
"""Further fields of a message that chat templates know: history that other clients recorded."""

IMAGE_TYPES = ("image_url", "input_image", "image")
VIDEO_TYPES = ("video_url", "input_video", "video")


@dataclass(frozen=True, slots=True)
class TextContent:
    """Text of a message; it stays text, whatever it spells."""

    text: str


@dataclass(frozen=True, slots=True)
class MediaContent:
    """A medium in its place: the request's item `media_index`, of `kind` "image" or "video"."""

    media_index: int
    kind: str


@dataclass(frozen=True, slots=True)
class Message:
    """One turn. `fields` are further JSON fields that templates know, such as `tool_calls` or `reasoning_content`."""

    role: str
    parts: tuple[TextContent | MediaContent, ...]
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise BadRequest(f"role {self.role!r} is none of {', '.join(ROLES)}", param="messages")
        if not self.fields.keys().isdisjoint({"role", "content"}):
            raise ValueError("role and content of a message are not further fields")


@dataclass(frozen=True, slots=True)
class MediaSource:
    """A medium as a request spells it: `url` is a data URL or a link."""

    kind: str
    url: str = field(repr=False)
    options: MediaOptions
    param: str
    """The field it stands in, for error messages."""


@dataclass(frozen=True, slots=True)
class Said:
    """The messages of a request and, in order of `MediaContent.media_index`, the media they name."""

    messages: tuple[Message, ...]
    sources: tuple[MediaSource, ...]


@dataclass
class _Reader:
    """Collects the media of one request while its messages are read."""

    limits: MediaLimits
    sources: list[MediaSource] = field(default_factory=list)

    def message(self, message: Any, param: str) -> Message:
        if not isinstance(message, dict):
            raise BadRequest(f"{param} must be an object with role and content", param=param)
        role = message.get("role")
        if not isinstance(role, str) or role not in SPOKEN_ROLES:
            raise BadRequest(f"{param}.role must be one of {', '.join(SPOKEN_ROLES)}", param=f"{param}.role")
        parts = self.content(message.get("content"), f"{param}.content")
        fields = {name: message[name] for name in TEMPLATE_FIELDS if message.get(name) is not None}
        if not parts and message.get("content") is None and role != "assistant":
            raise BadRequest(f"{param}.content is required", param=f"{param}.content")
        return Message(SPOKEN_ROLES[role], parts, fields)

    def content(self, content: Any, param: str) -> tuple[TextContent | MediaContent, ...]:
        if content is None:
            return ()
        if isinstance(content, str):
            return (TextContent(content),)
        if not isinstance(content, list):
            raise BadRequest(f"{param} must be a string or a list of parts", param=param)
        return tuple(self.part(part, f"{param}[{i}]") for i, part in enumerate(content))

    def part(self, part: Any, param: str) -> TextContent | MediaContent:
        if isinstance(part, str):
            return TextContent(part)
        if not isinstance(part, dict):
            raise BadRequest(f"{param} must be an object with a type", param=param)
        kind = part.get("type")
        if kind is None:  # parts without a type are told by the one key they have
            kind = next((name for name in ("text", *IMAGE_TYPES, *VIDEO_TYPES) if name in part), None)
        if kind in ("text", "input_text"):
            text = part.get("text")
            if not isinstance(text, str):
                raise BadRequest(f"{param}.text must be a string", param=f"{param}.text")
            return TextContent(text)
        if kind in IMAGE_TYPES:
            return self.image(part, param)
        if kind in VIDEO_TYPES:
            raise BadRequest("video is not supported yet; send pictures", param=param, code="unsupported_part")
        raise BadRequest(f"{param}.type {kind!r} is not supported; known: text, image_url", param=f"{param}.type")

    def image(self, part: dict[str, Any], param: str) -> MediaContent:
        self.limits.check_count(len(self.sources) + 1, param)
        name = next((name for name in ("image_url", "image") if part.get(name) is not None), None)
        if name is None:
            raise BadRequest(f"{param}.image_url is required", param=f"{param}.image_url")
        source, at = part[name], f"{param}.{name}"
        stated = source if isinstance(source, dict) else part
        url, at_url = (source.get("url"), f"{at}.url") if isinstance(source, dict) else (source, at)
        if not isinstance(url, str):
            raise BadRequest(f"{at_url} must be a string: a data URL", param=at_url)
        options = MediaOptions(_pixels(stated, "min_pixels", at), _pixels(stated, "max_pixels", at))
        self.sources.append(MediaSource("image", url, options, at_url))
        return MediaContent(len(self.sources) - 1, "image")


def _pixels(stated: Mapping[str, Any], name: str, param: str) -> int | None:
    value = stated.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequest(f"{param}.{name} must be a positive number of pixels", param=f"{param}.{name}")
    return value


def split_messages(messages: Sequence[Any], limits: MediaLimits) -> Said:
    """What the `messages` of a request say. BadRequest names the part: `messages[1].content[0].image_url.url`."""
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    reader = _Reader(limits)
    read = tuple(reader.message(message, f"messages[{i}]") for i, message in enumerate(messages))
    return Said(read, tuple(reader.sources))


def chain_parts(
    messages: Sequence[Message], content_ids: Sequence[Digest], options: Sequence[MediaOptions]
) -> list[ChainPart]:
    """What the messages say, in their order, as the media chain takes it; medium i has `content_ids[i]`."""
    parts: list[ChainPart] = []
    for message in messages:
        for part in message.parts:
            if isinstance(part, TextContent):
                parts.append(TextPart(message.role, part.text))
            else:
                i = part.media_index
                parts.append(MediaPart(message.role, part.kind, content_ids[i], options[i]))
    return parts
