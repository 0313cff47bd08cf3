"""A conversation as the template gets it: validated, with text and media apart."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prism_server.errors import BadRequest

ROLES = ("system", "user", "assistant", "tool")


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
