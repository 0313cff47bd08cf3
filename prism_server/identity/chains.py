"""The page chain (engine only) and the media chain (router and engine).

A page key names the KV of one page: it covers everything to the left of it. A media-chain key names "this medium after
all that the request says before it" without a tokenizer. The engine ties the two with boundary entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prism_server.identity.digest import Digest, Field, framed_digest
from prism_server.identity.media import MediaOptions


@dataclass(frozen=True, slots=True)
class PageSpan:
    """One medium's part of a page: rows [start, start + rows) of the page show the item's rows from `offset`."""

    start: int
    rows: int
    content_id: Digest
    layout: Digest
    offset: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.rows < 1 or self.offset < 0:
            raise ValueError(f"a page span needs start >= 0, rows >= 1, offset >= 0: {self}")


@dataclass(frozen=True, slots=True)
class TextPart:
    """What one role says, as UTF-8 text. Adjacent parts of one role are not merged."""

    role: str
    text: str


@dataclass(frozen=True, slots=True)
class MediaPart:
    """One medium of a request in its place: its content id and what the request said about it."""

    role: str
    kind: str
    content_id: Digest
    options: MediaOptions = MediaOptions()


ChainPart = TextPart | MediaPart


def namespace_digest(model: str, revision: str, kv_dtype: str, processor: str) -> Digest:
    """Caches of two namespaces share nothing: another model, revision, KV type or processor fingerprint."""
    return framed_digest("namespace", (model, revision, kv_dtype, processor))


def cache_seed(namespace: Digest, cache_salt: str | None) -> Digest:
    """Parent of a chain's first element. Requests with other salts share nothing."""
    return framed_digest("seed", (namespace, cache_salt))


def page_key(parent: Digest, token_ids: npt.NDArray[np.int32], spans: Sequence[PageSpan]) -> Digest:
    """Key of the rows `token_ids` (int32 [rows], a whole page or its computed beginning) that follow `parent`."""
    fields: list[Field] = [parent, np.ascontiguousarray(token_ids, dtype="<i4").tobytes()]
    for span in spans:
        fields += [span.start, span.rows, span.content_id, span.layout, span.offset]
    return framed_digest("page", fields)


def media_chain_keys(seed: Digest, parts: Iterable[ChainPart]) -> list[Digest]:
    """One key per medium, in order: H(parent, text parts since the medium before, content id, options)."""
    keys: list[Digest] = []
    parent, said = seed, list[Field]()
    for part in parts:
        if isinstance(part, TextPart):
            said += ["text", part.role, part.text]
        else:
            said += ["media", part.role, part.kind, part.content_id, *part.options.fields()]
            parent = framed_digest("media-chain", (parent, *said))
            keys.append(parent)
            said = []
    return keys
