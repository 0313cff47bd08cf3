"""What a request says: turns with text and media apart, every part checked. Router and engine read alike.

Media are still as the request spelled them; nothing is decoded or fetched here.
"""

from __future__ import annotations

import reprlib
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
SAMPLINGS = ("even", "scenes")
"""How a clip's frames are chosen: evenly in time, or more of them where the picture changes more."""
MIN_FPS, MAX_FPS = 1e-6, 1000
"""A frame in eleven days, and slow motion: times stay numbers that a prompt can say."""


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
    frames: tuple[str, ...] = field(default=(), repr=False)
    """Of a clip that comes as a list of pictures: their URLs; `url` is empty then."""


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
            return self.video(part, param)
        known = "text, image_url, video_url"
        raise BadRequest(f"{param}.type {reprlib.repr(kind)} is not supported; known: {known}", param=f"{param}.type")

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
        options = MediaOptions(_count(stated, "min_pixels", "pixels", at), _count(stated, "max_pixels", "pixels", at))
        self.sources.append(MediaSource("image", url, options, at_url))
        return MediaContent(len(self.sources) - 1, "image")

    def video(self, part: dict[str, Any], param: str) -> MediaContent:
        """A clip: one URL, or the URLs of its frames with their `fps`; options beside it or beside the part's type."""
        self.limits.check_count(len(self.sources) + 1, param)
        name = next((name for name in ("video_url", "video") if part.get(name) is not None), None)
        if name is None:
            raise BadRequest(f"{param}.video_url is required", param=f"{param}.video_url")
        source, at = part[name], f"{param}.{name}"
        stated = {**part, **source} if isinstance(source, dict) else part
        if isinstance(source, dict):
            inner = "frames" if source.get("frames") is not None else "url"
            source, at = source.get(inner), f"{at}.{inner}"
        options = _clip_options(stated, param)
        if isinstance(source, list):
            self.sources.append(MediaSource("video", "", options, at, self.frames(source, options, at, param)))
        elif isinstance(source, str):
            self.sources.append(MediaSource("video", source, options, at))
        else:
            raise BadRequest(f"{at} must be a string, a data URL, or a list of frames", param=at)
        return MediaContent(len(self.sources) - 1, "video")

    def frames(self, listed: list[Any], options: MediaOptions, at: str, param: str) -> tuple[str, ...]:
        self.limits.check_listed_frames(len(listed), at)
        if options.fps is None:
            raise BadRequest(f"{param}.fps is required with a list of frames", param=f"{param}.fps")
        urls: list[str] = []
        for i, frame in enumerate(listed):
            url = frame.get("url", frame.get("image_url")) if isinstance(frame, dict) else frame
            if not isinstance(url, str):
                raise BadRequest(f"{at}[{i}] must be a string: a data URL", param=f"{at}[{i}]")
            urls.append(url)
        return tuple(urls)


def _clip_options(stated: Mapping[str, Any], param: str) -> MediaOptions:
    fps, sampling = stated.get("fps"), stated.get("sampling")
    is_number = isinstance(fps, int | float) and not isinstance(fps, bool)
    if fps is not None and not (is_number and MIN_FPS <= fps <= MAX_FPS):
        reason = f"{param}.fps must be a number of frames a second, from {MIN_FPS:f} to {MAX_FPS}"
        raise BadRequest(reason, param=f"{param}.fps")
    if sampling not in (None, *SAMPLINGS):
        raise BadRequest(f"{param}.sampling must be one of {', '.join(SAMPLINGS)}", param=f"{param}.sampling")
    return MediaOptions(
        _count(stated, "min_pixels", "pixels", param),
        _count(stated, "max_pixels", "pixels", param),
        None if fps is None else float(fps),
        _count(stated, "min_frames", "frames", param),
        _count(stated, "max_frames", "frames", param),
        sampling,
    )


def _count(stated: Mapping[str, Any], name: str, unit: str, param: str) -> int | None:
    value = stated.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequest(f"{param}.{name} must be a positive number of {unit}", param=f"{param}.{name}")
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
