"""From a request's bytes to what placement needs: its media by content, its chains, its size. For worker threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from prism_server.errors import BadRequest
from prism_server.identity import (
    ChainPart,
    Digest,
    MediaPart,
    TextPart,
    cache_seed,
    framed_digest,
    link_digest,
    media_chain_keys,
)
from prism_server.media.data_url import data_url_bytes
from prism_server.media.item import MediaItem
from prism_server.media.link import is_link
from prism_server.media.messages import MediaSource, chain_parts, split_messages
from prism_server.router.media_size import UNLIMITED, USUAL, MediaSizer
from prism_server.router.pods import KeyScheme

CHARACTERS_PER_TOKEN = 4
"""A rough guess; only compared with picture tokens, which are exact."""
TEXT_BLOCK_CHARACTERS = 1024
MAX_TEXT_KEYS = 64
LEAST_HOME_TOKENS = 256
"""A text that has less in common with others may go anywhere."""

ContentOf = Callable[[Digest], Digest | None]
"""The content id behind a link's digest, if a pod has reported it (`Fleet.content_of`)."""


@dataclass(frozen=True, slots=True)
class RequestMedium:
    """One medium of a request. `name` is its content id, or the digest of its link until the content is known."""

    name: Digest
    num_tokens: int
    num_patches: int


@dataclass(frozen=True, slots=True)
class RequestKeys:
    """One request as placement sees it. An unreadable one has no keys: any pod will refuse it alike."""

    media: tuple[RequestMedium, ...] = ()
    chains: Mapping[KeyScheme, tuple[Digest, ...]] = field(default_factory=dict)
    """For each scheme one key per medium, in order."""
    tokens_before: tuple[int, ...] = ()
    """Estimated prompt tokens up to the end of each medium: what its chain key spares."""
    text_chain: tuple[Digest, ...] = ()
    """Without media: keys of ever longer beginnings of the text. The same for every scheme."""
    text_tokens: tuple[int, ...] = ()
    """Estimated tokens up to each key of `text_chain`."""
    num_tokens: int = 0
    """Estimated prompt tokens, media included."""
    answer_tokens: int | None = None
    """Most tokens of the answer, if the request says so."""
    is_stream: bool = False

    @property
    def home_key(self) -> Digest | None:
        """What the rendezvous order goes by: the first medium's content, which no version changes, or a long beginning.

        None: nothing that is worth a home.
        """
        if self.media:
            return self.media[0].name
        beginnings = zip(self.text_chain, self.text_tokens, strict=True)
        return next((key for key, tokens in beginnings if tokens >= LEAST_HOME_TOKENS), None)

    def __post_init__(self) -> None:
        sizes = {len(self.media), len(self.tokens_before), *map(len, self.chains.values())}
        if len(sizes) > 1 or len(self.text_chain) != len(self.text_tokens):
            raise ValueError(f"keys and sizes of a request do not fit: {self}")


class _Body(msgspec.Struct, frozen=True):
    """What the router reads of a body. Loose: whatever is wrong with it, the pod says."""

    messages: Any = None
    prompt: Any = None
    cache_salt: Any = None
    stream: Any = None
    max_tokens: Any = None
    max_completion_tokens: Any = None

    def answer_tokens(self) -> int | None:
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return limit if isinstance(limit, int) and limit > 0 else None


_decode = msgspec.json.Decoder(_Body).decode


def read_request(
    path: str,
    body: bytes | bytearray,
    schemes: Iterable[KeyScheme],
    sizer: MediaSizer,
    content_of: ContentOf = lambda _: None,
) -> RequestKeys:
    """The keys of a request to `path` ("/v1/chat/completions", ...). Never raises for what a client sent."""
    try:
        body_fields = _decode(body)
        salt, messages = body_fields.cache_salt, body_fields.messages
        if not isinstance(salt, str | None):
            return RequestKeys()
        if isinstance(messages, list) and path != "/v1/completions":
            keys = _chat_keys(messages, salt, schemes, sizer, content_of)
        else:
            keys = _text_keys([TextPart("", text) for text in _prompt_texts(body_fields.prompt)], salt)
    except (msgspec.DecodeError, BadRequest, RecursionError):
        return RequestKeys()
    is_stream = body_fields.stream is not False if path == "/v1/generate" else body_fields.stream is True
    return replace(keys, answer_tokens=body_fields.answer_tokens(), is_stream=is_stream)


def _chat_keys(
    messages: Sequence[Any], salt: str | None, schemes: Iterable[KeyScheme], sizer: MediaSizer, content_of: ContentOf
) -> RequestKeys:
    """Keys of a conversation. Raises BadRequest for one that every pod refuses."""
    said = split_messages(messages, UNLIMITED)
    media = [_medium(source, sizer, content_of) for source in said.sources]
    parts = chain_parts(said.messages, [item.name for item in media], [source.options for source in said.sources])
    if not media:
        return _text_keys([part for part in parts if isinstance(part, TextPart)], salt)
    num_characters, num_media_tokens, tokens_before = 0, 0, list[int]()
    remaining = iter(media)
    for part in parts:
        if isinstance(part, MediaPart):
            num_media_tokens += next(remaining).num_tokens
            tokens_before.append(num_media_tokens + num_characters // CHARACTERS_PER_TOKEN)
        else:
            num_characters += len(part.text)
    return RequestKeys(
        media=tuple(media),
        chains={scheme: chain_of(scheme, parts, salt) for scheme in schemes},
        tokens_before=tuple(tokens_before),
        num_tokens=num_media_tokens + num_characters // CHARACTERS_PER_TOKEN + 1,
    )


def chain_of(scheme: KeyScheme, parts: Iterable[ChainPart], salt: str | None) -> tuple[Digest, ...]:
    """The media-chain keys that a pod of this scheme reports for these parts."""
    return tuple(media_chain_keys(cache_seed(scheme.namespace, salt), parts))


def _medium(source: MediaSource, sizer: MediaSizer, content_of: ContentOf) -> RequestMedium:
    """Raises BadRequest for a data URL that cannot be decoded."""
    links = [url for url in source.frames or (source.url,) if is_link(url)]
    if links:
        name = link_digest("\n".join(source.frames or links))  # a list with links in it is never known by content
        content, item = content_of(name), MediaItem(source.kind, b"", source.options)
        if content is None:
            return RequestMedium(name, USUAL.num_tokens, USUAL.num_patches)
    else:
        frames = tuple(data_url_bytes(url, UNLIMITED, source.param) for url in source.frames)
        data = b"" if frames else data_url_bytes(source.url, UNLIMITED, source.param)
        item = MediaItem(source.kind, data, source.options, source.param, frames)
        content = item.content_id
    size = sizer.size(item, content)
    return RequestMedium(content, size.num_tokens, size.num_patches)


def _prompt_texts(prompt: Any) -> list[str]:
    """The text of a bare prompt; token ids are not looked into."""
    texts = prompt if isinstance(prompt, list) else [prompt]
    return [text for text in texts if isinstance(text, str)]


def _text_keys(parts: Sequence[TextPart], salt: str | None) -> RequestKeys:
    """Keys after every full block of each part, and after every part but the last: where later requests may differ."""
    keys, tokens, num_characters = list[Digest](), list[int](), 0
    parent = framed_digest("text-seed", (salt,))
    for index, part in enumerate(parts):
        for block in _blocks(part.text, is_last=index == len(parts) - 1):
            num_characters += len(block)
            if len(keys) < MAX_TEXT_KEYS:
                parent = framed_digest("text", (parent, part.role, block))
                keys.append(parent)
                tokens.append(num_characters // CHARACTERS_PER_TOKEN)
    num_tokens = sum(len(part.text) for part in parts) // CHARACTERS_PER_TOKEN + 1
    return RequestKeys(text_chain=tuple(keys), text_tokens=tuple(tokens), num_tokens=num_tokens)


def _blocks(text: str, is_last: bool) -> Iterator[str]:
    """The text in blocks. The last part's own rest is left out: it is the question."""
    for start in range(0, len(text), TEXT_BLOCK_CHARACTERS):
        block = text[start : start + TEXT_BLOCK_CHARACTERS]
        if len(block) == TEXT_BLOCK_CHARACTERS or not is_last:
            yield block
