"""`GET /internal/cache` of a pod, read: from its JSON to a `CacheAnswer`."""

from __future__ import annotations

import msgspec

from prism_server.identity import Digest, LinkContent
from prism_server.router.pods import CacheAnswer, KeyScheme, PodLoad

DIGEST_BYTES = 32


class AnswerError(ValueError):
    """A pod's answer cannot be understood: another program, or a version too far away."""


class _Load(msgspec.Struct, frozen=True):
    """The fields that matter here. `phase` is "ready" while new requests are taken."""

    phase: str
    total_pages: int = 0
    inside: int = 0
    uncached_tokens: int | None = None
    max_running: int = 0
    max_waiting: int = 0
    ms_per_token: float | None = None
    ms_per_patch: float | None = None


class _Link(msgspec.Struct, frozen=True):
    url_digest: str
    content_id: str


class _Cache(msgspec.Struct, frozen=True):
    """Digests are hexadecimal."""

    key_version: int
    namespace: str
    layout: str
    epoch: str
    cursor: int
    snapshot: bool
    load: _Load
    chains_added: list[str] = []
    chains_evicted: list[str] = []
    features_added: list[str] = []
    features_evicted: list[str] = []
    links: list[_Link] = []


_decode = msgspec.json.Decoder(_Cache).decode


def parse_cache(body: bytes) -> CacheAnswer:
    """Any thread. Raises AnswerError."""
    try:
        raw = _decode(body)
        return CacheAnswer(
            scheme=KeyScheme(raw.key_version, _digest(raw.namespace), raw.layout),
            epoch=raw.epoch,
            cursor=raw.cursor,
            is_snapshot=raw.snapshot,
            chains_added=_digests(raw.chains_added),
            chains_evicted=_digests(raw.chains_evicted),
            features_added=_digests(raw.features_added),
            features_evicted=_digests(raw.features_evicted),
            links=tuple(LinkContent(_digest(link.url_digest), _digest(link.content_id)) for link in raw.links),
            load=_load(raw.load),
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise AnswerError(f"/internal/cache: {error}") from error


def _load(raw: _Load) -> PodLoad:
    return PodLoad(
        total_pages=raw.total_pages,
        inside=raw.inside,
        uncached_tokens=raw.uncached_tokens,
        max_inside=raw.max_running + raw.max_waiting,
        is_draining=raw.phase != "ready",
        ms_per_token=raw.ms_per_token,
        ms_per_patch=raw.ms_per_patch,
    )


def _digests(texts: list[str]) -> tuple[Digest, ...]:
    return tuple(map(_digest, texts))


def _digest(text: str) -> Digest:
    digest = bytes.fromhex(text)
    if len(digest) != DIGEST_BYTES:
        raise ValueError(f"a key has {len(digest)} bytes instead of {DIGEST_BYTES}")
    return digest
