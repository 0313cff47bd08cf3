"""Pods as the router sees them: who they are, which keys they speak, what they say about themselves."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from prism_server.identity import KEY_VERSION, Digest

DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class Pod:
    """One engine pod, as discovery finds it. Where to reach it is discovery's to know.

    `home` is the stable name (of a StatefulSet's pod), under which keys find it again after a restart; `uid` names this
    incarnation: what was known about another uid says nothing about it.
    """

    home: str
    uid: str
    is_ready: bool = True
    """Answers its readiness probe."""
    is_terminating: bool = False


@dataclass(frozen=True, slots=True)
class KeyScheme:
    """Pods with equal schemes give a request the same media chain. `namespace` is a digest, the others as published."""

    key_version: int
    namespace: Digest
    layout: str

    @property
    def is_known(self) -> bool:
        """Whether this router can compute such keys. Otherwise the pod gets work by rendezvous and load alone."""
        return self.key_version == KEY_VERSION


@dataclass(frozen=True, slots=True)
class PodLoad:
    """What a pod says about its work and its room, at the moment of its answer. None: it does not say."""

    epoch: str = ""
    total_pages: int = 0
    inside: int = 0
    """Requests between their first header and their last byte."""
    uncached_tokens: int | None = None
    """Prompt tokens that running and waiting requests still have to compute."""
    max_inside: int = 0
    """Requests that it takes before it answers 429; 0: unknown."""
    is_draining: bool = False
    ms_per_token: float | None = None
    """Prefill, as measured."""
    ms_per_patch: float | None = None
    """The vision encoder, all of its blocks, as measured."""


@dataclass(frozen=True, slots=True)
class LinkContent:
    """A link that the pod has fetched, and what it found there."""

    url_digest: Digest
    content_id: Digest


@dataclass(frozen=True, slots=True)
class CacheAnswer:
    """`GET /internal/cache`: keys gained and lost since the position asked for, or all that is held (`is_snapshot`)."""

    scheme: KeyScheme
    epoch: str
    cursor: int
    is_snapshot: bool
    chains_added: tuple[Digest, ...] = ()
    chains_evicted: tuple[Digest, ...] = ()
    features_added: tuple[Digest, ...] = ()
    features_evicted: tuple[Digest, ...] = ()
    links: tuple[LinkContent, ...] = ()
    load: PodLoad | None = None
    """Absent from pods that report it only in `/internal/capacity`."""


class AnswerError(ValueError):
    """A pod's answer cannot be understood: another program, or a version too far away."""


class _Identity(msgspec.Struct, frozen=True):
    key_version: int
    namespace: str
    layout: str
    page_tokens: int

    def scheme(self) -> KeyScheme:
        return KeyScheme(self.key_version, _digest(self.namespace), self.layout)


class _Load(msgspec.Struct, frozen=True):
    """The fields of `/internal/capacity` that matter here; the same stand under `load` of the cache answer."""

    epoch: str = ""
    total_pages: int = 0
    inside: int = 0
    uncached_tokens: int | None = None
    max_running: int = 0
    max_waiting: int = 0
    phase: str = ""
    ms_per_token: float | None = None
    ms_per_patch: float | None = None


class _Link(msgspec.Struct, frozen=True):
    url_digest: str
    content_id: str


class _Cache(_Identity, frozen=True, kw_only=True):
    epoch: str
    cursor: int
    snapshot: bool
    chains_added: list[str] = []
    chains_evicted: list[str] = []
    features_added: list[str] = []
    features_evicted: list[str] = []
    links: list[_Link] = []
    load: _Load | None = None


_decode_cache = msgspec.json.Decoder(_Cache).decode
_decode_identity = msgspec.json.Decoder(_Identity).decode
_decode_load = msgspec.json.Decoder(_Load).decode


def parse_cache(body: bytes) -> CacheAnswer:
    """Raises AnswerError."""
    try:
        raw = _decode_cache(body)
        return CacheAnswer(
            scheme=raw.scheme(),
            epoch=raw.epoch,
            cursor=raw.cursor,
            is_snapshot=raw.snapshot,
            chains_added=_digests(raw.chains_added),
            chains_evicted=_digests(raw.chains_evicted),
            features_added=_digests(raw.features_added),
            features_evicted=_digests(raw.features_evicted),
            links=tuple(LinkContent(_digest(link.url_digest), _digest(link.content_id)) for link in raw.links),
            load=None if raw.load is None else _load(raw.load),
        )
    except (msgspec.DecodeError, ValueError) as error:
        raise AnswerError(f"/internal/cache: {error}") from error


def parse_capacity(body: bytes) -> tuple[KeyScheme, PodLoad]:
    """`GET /internal/capacity`. Raises AnswerError."""
    try:
        return _decode_identity(body).scheme(), _load(_decode_load(body))
    except (msgspec.DecodeError, ValueError) as error:
        raise AnswerError(f"/internal/capacity: {error}") from error


def _load(raw: _Load) -> PodLoad:
    return PodLoad(
        epoch=raw.epoch,
        total_pages=raw.total_pages,
        inside=raw.inside,
        uncached_tokens=raw.uncached_tokens,
        max_inside=raw.max_running + raw.max_waiting,
        is_draining=raw.phase not in ("", "ready"),
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
