"""What placement decides, and why."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Reason(StrEnum):
    """Why a pod was chosen; label of the metric of decisions."""

    CHAIN = "chain"
    """It holds the KV of the request's beginning."""
    COMPUTING = "computing"
    """It is computing the same media for another request right now."""
    FEATURES = "features"
    """It holds encoder outputs of the request's media."""
    TEXT = "text"
    """It has seen the same beginning of the text."""
    HOME = "home"
    """Nobody holds anything; the first of the rendezvous order."""
    SPILL = "spill"
    """Further down the rendezvous order: those before it are loaded, full, or cannot take this request."""
    LEAST_LOADED = "least_loaded"
    """The request has no key."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One pod's case, for people. Times in milliseconds."""

    uid: str
    name: str
    order: int
    """Place in the rendezvous order, 0 is the home; -1: the request has no key."""
    wait_ms: float
    own_ms: float
    load_ratio: float
    """Its load over what the bound allows; above 1 it is passed over."""
    cached_tokens: int
    cached_media: int
    cached_features: int


@dataclass(frozen=True, slots=True)
class Decision:
    """Where the request goes, and what is expected there. Sent on as `x-prism-cache`."""

    uid: str
    name: str
    reason: Reason
    cached_tokens: int
    cached_media: int
    """Media whose KV is expected to be there."""
    cached_features: int
    """Further media whose encoder outputs are expected to be there."""
    num_media: int
    wait_ms: float
    """Estimated, before the request's turn."""
    own_ms: float
    """Estimated, from its turn to its first token."""


@dataclass(frozen=True, slots=True)
class NoPod:
    """Nobody can take the request now."""

    reason: str
    """"no_pods" (none is ready), "saturated" (all have answered 429 or are full), "excluded" (all were tried)."""
    retry_after_s: float
