"""Messages of a request: text and media taken apart, every part checked where it stands.

Base64 is undone here, so this runs in a worker thread, never on the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prism_server.errors import BadRequest
from prism_server.identity import MediaOptions
from prism_server.media.data_url import data_url_bytes
from prism_server.media.item import MediaItem
from prism_server.media.limits import MediaLimits
from prism_server.prompt.messages import MediaContent, Message, TextContent

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",  # OpenAI's newer name of the same
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
TEMPLATE_FIELDS = ("tool_calls", "reasoning_content")
"""Further fields of a message that chat templates know: history that other clients recorded."""

IMAGE_TYPES = ("image_url", "input_image", "image")
VIDEO_TYPES = ("video_url", "input_video", "video")


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages for the template and, in order of `MediaContent.media_index`, their media."""

    messages: tuple[Message, ...]
    media: tuple[MediaItem, ...]


@dataclass
class _Reader:
    """Collects the media of one request while its messages are read."""

    limits: MediaLimits
    media: list[MediaItem] = field(default_factory=list)

    def message(self, message: Any, param: str) -> Message:
        if not isinstance(message, dict):
            raise BadRequest(f"{param} must be an object with role and content", param=param)
        role = message.get("role")
        if not isinstance(role, str) or role not in ROLES:
            raise BadRequest(f"{param}.role must be one of {', '.join(ROLES)}", param=f"{param}.role")
        parts = self.content(message.get("content"), f"{param}.content")
        fields = {name: message[name] for name in TEMPLATE_FIELDS if message.get(name) is not None}
        if not parts and message.get("content") is None and role != "assistant":
            raise BadRequest(f"{param}.content is required", param=f"{param}.content")
        return Message(ROLES[role], parts, fields)

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
        self.limits.check_count(len(self.media) + 1, param)
        name = next((name for name in ("image_url", "image") if part.get(name) is not None), None)
        if name is None:
            raise BadRequest(f"{param}.image_url is required", param=f"{param}.image_url")
        source, at = part[name], f"{param}.{name}"
        stated = source if isinstance(source, dict) else part
        url, at_url = (source.get("url"), f"{at}.url") if isinstance(source, dict) else (source, at)
        if not isinstance(url, str):
            raise BadRequest(f"{at_url} must be a string: a data URL", param=at_url)
        options = MediaOptions(_pixels(stated, "min_pixels", at), _pixels(stated, "max_pixels", at))
        data = data_url_bytes(url, self.limits, at_url)
        self.media.append(MediaItem("image", data, options, param=at_url))
        return MediaContent(len(self.media) - 1, "image")


def _pixels(stated: Mapping[str, Any], name: str, param: str) -> int | None:
    value = stated.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise BadRequest(f"{param}.{name} must be a positive number of pixels", param=f"{param}.{name}")
    return value


def read_messages(messages: Sequence[Any], limits: MediaLimits) -> Conversation:
    """The conversation of a request. BadRequest names the part: `messages[1].content[0].image_url.url`."""
    if not messages:
        raise BadRequest("messages must not be empty", param="messages")
    reader = _Reader(limits)
    read = tuple(reader.message(message, f"messages[{i}]") for i, message in enumerate(messages))
    return Conversation(read, tuple(reader.media))
