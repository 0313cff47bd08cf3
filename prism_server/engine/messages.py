"""The seam between serving and engine: small, typed, serialisable messages; no shared objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from prism_server.errors import BadRequest, PrismError
from prism_server.identity import Digest
from prism_server.media.item import MediaItem
from prism_server.prompt.encoded import EncodedPrompt

MAX_SAMPLES = 16
MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
"""Of one stop string. Every one is looked for in every character of the answer."""
MAX_STOP_TOKEN_IDS = 256
LARGEST_INT = 2**31 - 1
"""Of every number that JSON gives without an end: what comes after this counts in arrays and floats."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off.

    `logprobs`: None for none, else how many alternatives to report beside the chosen token's own (0 is allowed).
    Sample i of `n` draws from `seed` and i, so that a seeded request repeats itself whatever runs beside it.

    BadRequest, with `param`: a value out of its range. Whatever passes can be computed with, and costs a step little.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        rules: tuple[tuple[bool, str, str], ...] = (
            (1 <= self.max_tokens <= LARGEST_INT, "max_tokens", f"must lie between 1 and {LARGEST_INT}"),
            (0 <= self.min_tokens <= self.max_tokens, "min_tokens", "must lie between 0 and max_tokens"),
            (0.0 <= self.temperature <= 100.0, "temperature", "must lie between 0 and 100"),
            (0 <= self.top_k <= LARGEST_INT, "top_k", f"must lie between 0 (off) and {LARGEST_INT}"),
            (0.0 < self.top_p <= 1.0, "top_p", "must be above 0 and at most 1"),
            (0.0 <= self.min_p <= 1.0, "min_p", "must lie between 0 and 1"),
            (0.01 <= self.repetition_penalty <= 100.0, "repetition_penalty", "must lie between 0.01 and 100"),
            (-2.0 <= self.presence_penalty <= 2.0, "presence_penalty", "must lie between -2 and 2"),
            (-2.0 <= self.frequency_penalty <= 2.0, "frequency_penalty", "must lie between -2 and 2"),
            (self.seed is None or -(2**63) <= self.seed < 2**63, "seed", "must be a 64-bit integer"),
            (len(self.stop) <= MAX_STOP_STRINGS, "stop", f"may have at most {MAX_STOP_STRINGS} strings"),
            (
                all(1 <= len(stop) <= MAX_STOP_CHARACTERS for stop in self.stop),
                "stop",
                f"strings must have 1 to {MAX_STOP_CHARACTERS} characters",
            ),
            (
                len(self.stop_token_ids) <= MAX_STOP_TOKEN_IDS,
                "stop_token_ids",
                f"may have at most {MAX_STOP_TOKEN_IDS} ids",
            ),
            (
                all(0 <= token_id <= LARGEST_INT for token_id in self.stop_token_ids),
                "stop_token_ids",
                f"must lie between 0 and {LARGEST_INT}",
            ),
            (
                self.logprobs is None or 0 <= self.logprobs <= MAX_TOP_LOGPROBS,
                "top_logprobs",
                f"must lie between 0 and {MAX_TOP_LOGPROBS}",
            ),
            (1 <= self.n <= MAX_SAMPLES, "n", f"must lie between 1 and {MAX_SAMPLES}"),
        )
        for holds, param, reason in rules:  # NaN fails every comparison, so it is refused too
            if not holds:
                raise BadRequest(f"{param} {reason}", param=param)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One validated request, prompt encoded and keyed. Times are seconds of the monotonic clock."""

    request_id: str
    prompt: EncodedPrompt
    media: tuple[MediaItem, ...]
    """In order of `MediaSpan.media_index`; the bytes are kept until the last media row is computed."""
    params: SamplingParams
    arrival_s: float
    deadline_s: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost and what it was spared. The four media counts are the product's promise, made visible."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    cached_media_tokens: int = 0
    prefilled_tokens: int = 0
    prefilled_media_tokens: int = 0
    decoded_items: int = 0
    """Media that a worker had to decode and resize."""
    encoded_items: int = 0
    """Media that the vision tower had to encode."""
    clip_frames: int = 0
    """Frames shown of all clips of the request."""
    lowered_clips: int = 0
    """Clips shown with fewer or smaller frames than asked for, to stay within the server's tokens for a clip."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Milliseconds. `media_ms` is the wait for decoded media; queue + media + prefill = first token."""

    queue_ms: float = 0.0
    media_ms: float = 0.0
    prefill_ms: float = 0.0
    encode_ms: float = 0.0
    """The part of `prefill_ms` in which the vision tower worked in steps that encoded for this request."""
    first_token_ms: float = 0.0
    total_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One chosen token's natural-log probability and the most likely alternatives, most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request was admitted; its cached prefix is known."""

    request_id: str
    usage: Usage


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one sample. `text` is what they complete: whole characters, no possible start of a stop string."""

    request_id: str
    sample: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleFinished:
    """One sample ended. `reason`: stop, length, cancelled or deadline; `stop_reason`: the string or id that matched."""

    request_id: str
    sample: int
    reason: str
    stop_reason: str | int | None = None


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """Every sample ended. The last event of a request that did not fail."""

    request_id: str
    usage: Usage
    timings: Timings


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """The last event of a request that failed or was refused."""

    request_id: str
    error: PrismError


@dataclass(frozen=True, slots=True)
class CacheChanged:
    """What the caches gained and lost in a step: media-chain keys (KV is held), content ids (features are held)."""

    chains_added: tuple[Digest, ...] = ()
    chains_evicted: tuple[Digest, ...] = ()
    features_added: tuple[Digest, ...] = ()
    features_evicted: tuple[Digest, ...] = ()


Event = Accepted | TokenDelta | SampleFinished | RequestFinished | RequestFailed | CacheChanged


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What an engine is, fixed from its start. `namespace` and `layout` are hex digests that routers compare."""

    model_name: str
    revision: str
    namespace: str
    layout: str
    kv_dtype: str
    page_tokens: int
    total_pages: int
    bytes_per_token: int
    max_context_tokens: int
    device: str
    backend: str
    dtype: str
    graphs: int = 0
    """Captured step sizes; 0 where every step is eager."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """Bytes of the GPU by what they are for, as measured at the start, and what the paper plan said; empty on a CPU."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of the engine, replaced whole after every step. Counters only grow; gauges are marked `_now`."""

    running_now: int = 0
    waiting_now: int = 0
    uncached_tokens_now: int = 0
    """Prompt tokens that running and waiting requests still have to compute."""
    total_pages: int = 0
    free_pages_now: int = 0
    evictable_pages_now: int = 0
    page_tokens: int = 0
    host_slots_total: int = 0
    host_slots_used_now: int = 0
    encoder_queue_now: int = 0
    """Items that are being decoded, or wait for the encoder."""
    feature_bytes_now: int = 0
    feature_bytes_capacity: int = 0
    ms_per_token: float | None = None
    """Prefill, as measured lately; None until it has been."""
    ms_per_patch: float | None = None
    """The vision encoder, all of its blocks, as measured lately; None until it has been."""
    steps: int = 0
    counters: dict[str, int] = field(default_factory=dict)
