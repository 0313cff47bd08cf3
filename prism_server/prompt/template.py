"""The checkpoint's chat template, rendered so that only the template itself can place a control token."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from prism_server.checkpoint_files import read_object, read_object_or_empty, read_text
from prism_server.errors import BadRequest, StartupError
from prism_server.media.messages import Message, TextContent

FIRST_STAND_IN = 0xD800
"""Stand-ins are lone surrogates: no valid text holds one, so none is ever taken for something that a user wrote."""

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt", "raise_exception", "strftime_now"})

Piece = str | int
"""A run of plain text, or the id of one control token."""


class ChatTemplate:
    """Renders messages into pieces.

    In every string that comes from the request, the first character of each added token (for Qwen: `<`) is swapped for
    a stand-in before rendering. What then looks like an added token was written by the template. The text between
    those is swapped back and encoded whole, so merges across the border of template and user text are the reference's.
    A template that looks for tags such as `</think>` inside a message finds none: earlier reasoning belongs into the
    message's `reasoning_content`.
    """

    def __init__(self, source: str, added_tokens: Mapping[str, int], named_tokens: Mapping[str, str]) -> None:
        """`source` is jinja text. Raises StartupError when it does not compile."""
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise StartupError(f"the chat template does not compile: {error}") from error
        self._ids = dict(added_tokens)
        self._named_tokens = dict(named_tokens)
        longest_first = sorted(self._ids, key=len, reverse=True)
        self._control = re.compile("(" + "|".join(map(re.escape, longest_first)) + ")")
        firsts = sorted({token[0] for token in self._ids})
        self._stand_ins = [(first, chr(FIRST_STAND_IN + i)) for i, first in enumerate(firsts)]

    @classmethod
    def load(cls, directory: Path, added_tokens: Mapping[str, int], named_tokens: Mapping[str, str]) -> ChatTemplate:
        """Reads `chat_template.jinja`, else `chat_template.json`, else the key of `tokenizer_config.json`."""
        return cls(_template_source(directory), added_tokens, named_tokens)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
    ) -> list[Piece]:
        """Pieces in order; text runs are not empty and never adjacent.

        `variables` are further names for the template (`enable_thinking`, `add_vision_id`). BadRequest for what the
        template refuses, for text that is not Unicode and for JSON nested too deeply.
        """
        reserved = RESERVED & (variables or {}).keys()
        if reserved:
            raise BadRequest(f"chat_template_kwargs may not set {min(reserved)}", param="chat_template_kwargs")
        try:
            names = {**self._named_tokens, **self._guarded(dict(variables or {}), "chat_template_kwargs")}
            rendered = self._template.render(
                names,
                documents=None,
                messages=[self._message(message) for message in messages],
                tools=self._guarded(list(tools), "tools") if tools else None,
                add_generation_prompt=add_generation_prompt,
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
            # the template is a program of the checkpoint: what it cannot digest is a fault of what it was given
            raise BadRequest(f"the chat template refuses these messages: {error}", param="messages") from error
        except RecursionError as error:
            raise BadRequest("the messages are nested too deeply", param="messages") from error
        return self._pieces(rendered)

    def _message(self, message: Message) -> dict[str, Any]:
        """As templates expect it: one text is a string, anything else a list of typed parts."""
        content: str | list[dict[str, str]] = [
            {"type": "text", "text": self._guarded(part.text, "messages")}
            if isinstance(part, TextContent)
            else {"type": part.kind}
            for part in message.parts
        ]
        match message.parts:
            case ():
                content = ""
            case (TextContent(text),):
                content = self._guarded(text, "messages")
        return {"role": message.role, "content": content, **self._guarded(dict(message.fields), "messages")}

    def _guarded(self, value: Any, param: str) -> Any:
        """A JSON value with the stand-ins in place, in keys too. BadRequest for a string that is not Unicode."""
        match value:
            case str():
                check_unicode(value, param)
                for first, stand_in in self._stand_ins:
                    value = value.replace(first, stand_in)
                return value
            case dict():
                return {self._guarded(key, param): self._guarded(item, param) for key, item in value.items()}
            case list() | tuple():
                return [self._guarded(item, param) for item in value]
            case _:
                return value

    def _pieces(self, rendered: str) -> list[Piece]:
        pieces: list[Piece] = []
        for i, text in enumerate(self._control.split(rendered)):
            if i % 2:  # the split alternates: text, token, text, ...
                pieces.append(self._ids[text])
            elif text:
                for first, stand_in in self._stand_ins:
                    text = text.replace(stand_in, first)
                pieces.append(text)
        return pieces


def check_unicode(text: str, param: str) -> None:
    """BadRequest when `text` holds half of a surrogate pair, which JSON can spell and UTF-8 cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRequest(
            f"the text holds half of a surrogate pair (U+{ord(text[error.start]):04X} at character {error.start})",
            param=param,
        ) from error


def _template_source(directory: Path) -> str:
    if (directory / "chat_template.jinja").exists():
        return read_text(directory / "chat_template.jinja")
    if (directory / "chat_template.json").exists():
        source = read_object(directory / "chat_template.json").get("chat_template")
    else:
        source = read_object_or_empty(directory / "tokenizer_config.json").get("chat_template")
    if isinstance(source, list):  # several named ones
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    if not isinstance(source, str):
        raise StartupError(f"{directory} has no chat template: chat_template.jinja is not there")
    return source


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as released chat templates expect it (the settings and helpers that transformers documents for them)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson  # jinja's own escapes HTML
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
