"""A simulated world for placement: a catalogue of pictures, questions about it, pods with caches. No HTTP, no clock.

A pod computes one prompt after the other, in the order of arrival, and keeps what it computed until its room is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from prism_server.identity import ChainPart, Digest, MediaOptions, MediaPart, TextPart, framed_digest, namespace_digest
from prism_server.router.estimate import Costs
from prism_server.router.pods import CacheAnswer, KeyScheme, PodLoad
from prism_server.router.request_keys import RequestKeys, RequestMedium, chain_of

SCHEME = KeyScheme(key_version=1, namespace=namespace_digest("simulated", "", "fp8", ""), layout="simulated")
SYSTEM_TEXT = TextPart("system", "You answer questions about pictures.")
SYSTEM_TOKENS = 9
QUESTION_TOKENS = 38
PICTURE_TOKENS = (196, 256, 400, 576, 784, 1024)
MOST_PICTURES = 8
PATCHES_PER_TOKEN = 4
SINGLE_SHARE = 0.1
"""Requests that show one picture of a group alone: their KV is another, their encoder outputs are the group's."""
POOL_TOKENS = 400_000
"""Tokens of KV that one pod holds."""
FEATURE_TOKENS = 32_768
"""Tokens of encoder outputs that one pod holds: 1 GiB of the 8B model's."""
CATALOGUE_SHARE = 1.5
"""Tokens of the catalogue over all pods' tokens: even together they do not hold it all."""
ANSWER_TOKENS = 64
MS_PER_ANSWER_TOKEN = 6.0


class Catalogue:
    """Groups of one to eight pictures, such as the pages of a contract, most popular first."""

    def __init__(self, num_pods: int, rng: np.random.Generator) -> None:
        mean_tokens = (1 + MOST_PICTURES) / 2 * float(np.mean(PICTURE_TOKENS))
        num_groups = int(CATALOGUE_SHARE * num_pods * POOL_TOKENS / mean_tokens)
        sizes = rng.integers(1, MOST_PICTURES + 1, num_groups)
        tokens = rng.choice(PICTURE_TOKENS, int(sizes.sum()))
        starts = np.concatenate(([0], np.cumsum(sizes)))
        self._tokens: list[list[int]] = [tokens[starts[i] : starts[i + 1]].tolist() for i in range(num_groups)]
        self._made: dict[tuple[int, int], RequestKeys] = {}

    def __len__(self) -> int:
        return len(self._tokens)

    def num_pictures(self, group: int) -> int:
        return len(self._tokens[group])

    def request(self, group: int, single: int) -> RequestKeys:
        """A question about the whole group (`single` is -1) or about one picture of it."""
        made = self._made.get((group, single))
        if made is None:
            pictures = range(len(self._tokens[group])) if single < 0 else (single,)
            made = self._made[group, single] = self._request(group, pictures)
        return made

    def _request(self, group: int, pictures: Sequence[int]) -> RequestKeys:
        media = tuple(self._medium(group, picture) for picture in pictures)
        parts: list[ChainPart] = [
            SYSTEM_TEXT,
            *(MediaPart("user", "image", medium.name, MediaOptions()) for medium in media),
        ]
        tokens_before = np.cumsum([SYSTEM_TOKENS + media[0].num_tokens, *(m.num_tokens for m in media[1:])])
        return RequestKeys(
            media=media,
            chains={SCHEME: chain_of(SCHEME, parts, None)},
            tokens_before=tuple(tokens_before.tolist()),
            num_tokens=int(tokens_before[-1]) + QUESTION_TOKENS,
            answer_tokens=ANSWER_TOKENS,
        )

    def _medium(self, group: int, picture: int) -> RequestMedium:
        tokens = self._tokens[group][picture]
        return RequestMedium(framed_digest("simulated", (group, picture)), tokens, tokens * PATCHES_PER_TOKEN)


def draw_requests(
    catalogue: Catalogue, num_requests: int, exponent: float, rng: np.random.Generator
) -> list[RequestKeys]:
    """What is asked, in order. The group of popularity rank r is drawn with weight r^-exponent."""
    weights = np.arange(1, len(catalogue) + 1, dtype=np.float64) ** -exponent
    cumulated: npt.NDArray[np.float64] = np.cumsum(weights) / weights.sum()
    groups = np.searchsorted(cumulated, rng.random(num_requests)).clip(max=len(catalogue) - 1).tolist()
    pictures, is_single = rng.integers(0, 1 << 30, num_requests).tolist(), rng.random(num_requests) < SINGLE_SHARE
    return [
        catalogue.request(group, picture % catalogue.num_pictures(group) if single else -1)
        for group, picture, single in zip(groups, pictures, is_single.tolist(), strict=True)
    ]


class LruCache:
    """Keys and their tokens; what was used longest ago leaves first."""

    def __init__(self, capacity_tokens: int) -> None:
        self._capacity = capacity_tokens
        self._tokens: dict[Digest, int] = {}
        self._used = 0

    def __contains__(self, key: Digest) -> bool:
        return key in self._tokens

    def use(self, key: Digest, num_tokens: int) -> bool:
        """The key becomes the youngest. Whether it was there."""
        was_there = self._tokens.pop(key, None) is not None
        self._tokens[key] = num_tokens
        if not was_there:
            self._used += num_tokens
        return was_there

    def shrink(self) -> list[Digest]:
        """Keys that had to leave."""
        evicted = []
        while self._used > self._capacity:
            key = next(iter(self._tokens))
            self._used -= self._tokens.pop(key)
            evicted.append(key)
        return evicted


@dataclass(frozen=True, slots=True)
class Served:
    """What a request found, and when it was answered."""

    cached_tokens: int
    work_ms: float
    first_byte_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class _Change:
    """What a request left behind and pushed out, once it was computed."""

    at_s: float
    chains_added: Sequence[Digest]
    chains_evicted: Sequence[Digest]
    features_added: Sequence[Digest]
    features_evicted: Sequence[Digest]


class SimulatedPod:
    """One pod: a cache of KV, one of encoder outputs, and a line of prompts. With `memory` of so many usual pods.

    Every reader (a router) has the journal of changes for itself.
    """

    def __init__(self, name: str, memory: int = 1, num_readers: int = 0) -> None:
        self.name = name
        self.costs = Costs()
        self._kv = LruCache(POOL_TOKENS * memory)
        self._features = LruCache(FEATURE_TOKENS * memory)
        self._busy_until_s = 0.0
        self._line: deque[tuple[float, float, int]] = deque()
        self._ends: deque[float] = deque()
        self._news: list[deque[_Change]] = [deque() for _ in range(num_readers)]
        self._cursors = [0] * num_readers

    def serve(self, request: RequestKeys, now_s: float) -> Served:
        """The request joins the line. Earlier ones are computed by its turn, so what it will find is known now."""
        chain, before = request.chains[SCHEME], request.tokens_before
        depth = next((depth for depth in range(len(chain), 0, -1) if chain[depth - 1] in self._kv), 0)
        for i in range(len(chain) - 1, -1, -1):  # the beginning last: what builds on it leaves before it
            self._kv.use(chain[i], before[i] - (before[i - 1] if i else 0))
        missing = [medium for medium in request.media[depth:] if not self._features.use(medium.name, medium.num_tokens)]
        cached_tokens = before[depth - 1] if depth else 0
        uncached_tokens = request.num_tokens - cached_tokens
        first_ms = self.costs.first_token_ms(uncached_tokens, sum(medium.num_patches for medium in missing))
        answer_ms = self.costs.answer_ms(request.answer_tokens)
        start_s = max(now_s, self._busy_until_s)
        first_byte_s = start_s + first_ms / 1e3
        self._busy_until_s = first_byte_s + answer_ms / 1e3
        end_s = first_byte_s + ANSWER_TOKENS * MS_PER_ANSWER_TOKEN / 1e3
        self._kv_changed(first_byte_s, chain[depth:], [medium.name for medium in missing])
        if self._news:
            self._line.append((start_s, first_byte_s, uncached_tokens))
            self._ends.append(end_s)
        return Served(cached_tokens, first_ms + answer_ms, first_byte_s, end_s)

    def _kv_changed(self, at_s: float, chains: Sequence[Digest], features: Sequence[Digest]) -> None:
        if chains or features:
            change = _Change(at_s, chains, self._kv.shrink(), features, self._features.shrink())
            for news in self._news:
                news.append(change)

    def answer(self, reader: int, now_s: float) -> CacheAnswer:
        """`/internal/cache` as this reader gets it: what has changed since it asked last, and the load."""
        chains, features = dict[Digest, bool](), dict[Digest, bool]()
        news, is_first = self._news[reader], self._cursors[reader] == 0
        while news and news[0].at_s <= now_s:
            change = news.popleft()
            for held, added, evicted in (
                (chains, change.chains_added, change.chains_evicted),
                (features, change.features_added, change.features_evicted),
            ):
                held.update(dict.fromkeys(evicted, False))
                held.update(dict.fromkeys(added, True))
        self._cursors[reader] += 1
        return CacheAnswer(
            scheme=SCHEME,
            epoch=self.name,
            cursor=self._cursors[reader],
            is_snapshot=is_first,
            chains_added=tuple(key for key, is_held in chains.items() if is_held),
            chains_evicted=tuple(key for key, is_held in chains.items() if not is_held),
            features_added=tuple(key for key, is_held in features.items() if is_held),
            features_evicted=tuple(key for key, is_held in features.items() if not is_held),
            load=self._load(now_s),
        )

    def _load(self, now_s: float) -> PodLoad:
        while self._line and self._line[0][1] <= now_s:
            self._line.popleft()
        while self._ends and self._ends[0] <= now_s:
            self._ends.popleft()
        uncached = sum(tokens * min(1.0, (end - now_s) / (end - start)) for start, end, tokens in self._line)
        return PodLoad(
            total_pages=POOL_TOKENS // 64,
            inside=len(self._ends),
            uncached_tokens=int(uncached),
        )
