"""Pods as the router sees them: who they are, which keys they speak, what they say about themselves.

One pod goes by four types, each of which adds something to the one before:

- `Pod`: which one it is, and whether it may be given work. All that placement needs to be told.
- `Endpoint` (`endpoints.py`): a `Pod`, and where to reach it. What discovery finds.
- `Member` (`members.py`): an endpoint that is followed, with its polls and its breaker. Where requests are sent.
- `PodState` (`pod_state.py`): a pod in the eyes of placement: what it says, what was sent to it. No I/O.

Everywhere `name` is the stable name, and `uid` another for each pod under that name.
"""

from __future__ import annotations

from dataclasses import dataclass

from prism_server.identity import KEY_VERSION, Digest, LinkContent


@dataclass(frozen=True, slots=True)
class Pod:
    """One engine pod.

    `name` is the stable name (of a StatefulSet's pod): the home of keys, where they find it again after a restart.
    `uid` names this incarnation: what was known about another uid says nothing about it.
    """

    name: str
    uid: str
    is_ready: bool | None = True
    """Answers its readiness probe. None: whoever found it cannot say; the router asks the pod itself."""
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
class CacheAnswer:
    """A pod's answer to a poll: keys gained and lost since the position asked for, or all it holds (`is_snapshot`)."""

    scheme: KeyScheme
    epoch: str
    cursor: int
    is_snapshot: bool
    chains_added: tuple[Digest, ...] = ()
    chains_evicted: tuple[Digest, ...] = ()
    features_added: tuple[Digest, ...] = ()
    features_evicted: tuple[Digest, ...] = ()
    links: tuple[LinkContent, ...] = ()
    load: PodLoad = PodLoad()
