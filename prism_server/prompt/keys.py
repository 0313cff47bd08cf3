"""The page chain of one prompt: a key for every full page, and boundary keys where media close."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from prism_server.identity import Digest, PageSpan, page_key
from prism_server.prompt.encoded import Boundary, MediaSpan


def page_spans(spans: Iterable[MediaSpan], start: int, end: int) -> list[PageSpan]:
    """The parts of `spans` that lie in rows [start, end), as seen from row `start`."""
    return [
        PageSpan(
            start=max(span.start - start, 0),
            rows=min(span.end, end) - max(span.start, start),
            content_id=span.facts.key.content_id,
            layout=span.facts.key.layout,
            offset=span.item_offset + max(start - span.start, 0),
        )
        for span in spans
        if span.start < end and span.end > start
    ]


class PageChain:
    """Keys of the rows of one prompt. `spans` are in order of rows and do not overlap."""

    def __init__(
        self, seed: Digest, token_ids: npt.NDArray[np.int32], spans: Sequence[MediaSpan], page_tokens: int
    ) -> None:
        self._token_ids = token_ids
        self._page_tokens = page_tokens
        self._parents = [seed]
        self._spans_of_page: dict[int, list[MediaSpan]] = {}
        for span in spans:
            for page in range(span.start // page_tokens, (span.end - 1) // page_tokens + 1):
                self._spans_of_page.setdefault(page, []).append(span)
        for page in range(len(token_ids) // page_tokens):
            self._parents.append(self._key(page, (page + 1) * page_tokens))

    @property
    def page_keys(self) -> tuple[Digest, ...]:
        """Keys of the full pages, in order."""
        return tuple(self._parents[1:])

    def boundary_key(self, rows: int) -> Digest:
        """Key of the first `rows` rows (at least one). At a page's end it is that page's key."""
        return self._key((rows - 1) // self._page_tokens, rows)

    def _key(self, page: int, end: int) -> Digest:
        """Key of the rows of `page` below row `end`."""
        start = page * self._page_tokens
        overlaps = page_spans(self._spans_of_page.get(page, ()), start, end)
        return page_key(self._parents[page], self._token_ids[start:end], overlaps)


def boundaries(chain: PageChain, spans: Sequence[MediaSpan], media_keys: Sequence[Digest]) -> tuple[Boundary, ...]:
    """One boundary where each medium closes; `media_keys[i]` is the media-chain key of what `spans[i]` shows."""
    return tuple(
        Boundary(span.close, chain.boundary_key(span.close), key)
        for span, key in zip(spans, media_keys, strict=True)
        if span.is_last
    )
