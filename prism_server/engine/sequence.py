"""One sample of a request, as the scheduler sees it. Mutable, and touched by the owner thread only."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from prism_server.engine.messages import GenerateRequest
from prism_server.identity import Digest
from prism_server.kv.cached_page import CachedPage
from prism_server.media.item import ItemFacts, ItemKey
from prism_server.prompt.encoded import Boundary, MediaSpan


class Phase(enum.Enum):
    """Where a sequence is. WAITING and PARKED hold nothing; the others hold pages and a device slot."""

    WAITING = "waiting"
    PARKED = "parked"
    """Another sequence is computing what this one needs next."""
    SWAPPING = "swapping"
    """Its prefix is on its way from the host."""
    MEDIA = "media"
    """Workers are decoding its media."""
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Rows: prompt first, then outputs. `num_planned` rows are in launched plans, `num_computed` of them completed."""

    number: int
    """Unique in the engine; also the order of arrival."""
    request: GenerateRequest
    sample: int
    seed: int
    max_outputs: int
    """Tokens it may generate: the request's, cut to the context."""

    prompt_tokens: int = field(init=False)
    spans: tuple[MediaSpan, ...] = field(init=False, repr=False)
    phase: Phase = Phase.WAITING
    outputs: list[int] = field(default_factory=list)
    num_drawn: int = 0
    """Tokens sampled by launched plans; the last may not be on the host yet."""
    num_planned: int = 0
    num_computed: int = 0
    num_prefill: int = 0
    """Rows known when it was admitted: the prompt, and after a preemption the outputs so far."""

    slot: int | None = None
    table: list[int] = field(default_factory=list)
    moved: list[tuple[int, int]] = field(default_factory=list)
    """(index, page) of its table that the device does not know yet."""
    twins: list[tuple[int, CachedPage]] = field(default_factory=list)
    """(index, node) of its table whose rows are being brought back into the node's page, too: to be shared then."""
    node: CachedPage | None = None
    """Where it stands in the prefix index: this node and all above are locked for it."""
    num_published: int = 0
    """Rows whose pages and boundaries have been offered to the index."""
    keys: list[Digest] = field(init=False)
    """Keys of its full pages so far: the prompt's, then those of decoded pages."""
    boundaries: list[Boundary] = field(init=False)
    last_boundary_rows: int = field(init=False)
    incarnation: int = 0
    """Raised whenever it leaves the device, so that results of older plans are told apart and dropped."""
    last_step: int = 0
    """Last launched step that names its pages."""
    ready_step: int = 0
    """SWAPPING until this step has completed."""

    parked_on: Digest | None = None
    parked_rows: int = 0
    """Rows that the key covers on which it was parked last."""
    leads: list[Digest] = field(default_factory=list)
    """Chain keys that it is computing and others may park on."""
    wanted: dict[ItemKey, None] = field(default_factory=dict)
    """Items that the workers are preparing for it. Ordered, as all such sets: the same requests give the same plans."""
    holds_staged: dict[ItemKey, None] = field(default_factory=dict)
    pins: dict[ItemKey, None] = field(default_factory=dict)
    """Items whose features are held for it."""
    uncached_estimate: int = 0

    num_cached: int = 0
    """Rows found when it was last admitted."""
    first_cached_tokens: int = 0
    first_cached_media_tokens: int = 0
    preemptions: int = 0
    starved: bool = False
    """As the oldest it could get no page: it goes first in the next step."""
    lost_pins: int = 0
    decoded_items: int = 0
    encoded_items: int = 0
    encode_ms: float = 0.0
    """What the encoder took in the steps that encoded for it."""
    prefilled_tokens: int = 0
    prefilled_media_tokens: int = 0
    admitted_s: float | None = None
    media_ready_s: float | None = None
    first_token_s: float | None = None
    num_reported: int = 0
    """Tokens that its client was told of."""

    def __post_init__(self) -> None:
        prompt = self.request.prompt
        self.prompt_tokens, self.spans = len(prompt), prompt.spans
        self.keys = list(prompt.page_keys)
        self.boundaries = list(prompt.boundaries)
        self.last_boundary_rows = max((boundary.rows for boundary in self.boundaries), default=0)

    def add_boundary(self, boundary: Boundary) -> None:
        self.boundaries.append(boundary)
        self.last_boundary_rows = max(self.last_boundary_rows, boundary.rows)

    @property
    def num_known(self) -> int:
        """Rows whose ids the host knows."""
        return self.prompt_tokens + len(self.outputs)

    @property
    def is_admitted(self) -> bool:
        return self.phase in (Phase.SWAPPING, Phase.MEDIA, Phase.PREFILL, Phase.DECODE)

    @property
    def remaining_prefill(self) -> int:
        return max(0, self.num_prefill - self.num_planned)

    @property
    def rows_before_media(self) -> int:
        """Rows before the first item of which rows are still to be planned."""
        return next((span.start for span in self.spans if span.end > self.num_planned), self.num_prefill)

    @property
    def has_row_to_decode(self) -> bool:
        """A decode row is there: everything but the last drawn token is planned, and more may be drawn."""
        return self.num_drawn < self.max_outputs and self.num_planned == self.prompt_tokens + self.num_drawn - 1

    def ids(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """int32 ids of known rows [start, end)."""
        prompt = self.request.prompt.token_ids
        if end <= self.prompt_tokens:
            return prompt[start:end]
        outputs = self.outputs[max(0, start - self.prompt_tokens) : end - self.prompt_tokens]
        return np.concatenate([prompt[start:], np.asarray(outputs, dtype=np.int32)])

    def positions(self, start: int, end: int) -> npt.NDArray[np.int32]:
        """int32 [3, end - start]: M-RoPE positions; after the prompt all three are row + delta."""
        prompt = self.request.prompt
        if end <= self.prompt_tokens:
            return prompt.positions[:, start:end]
        later = text_positions(max(start, self.prompt_tokens) + prompt.delta, end + prompt.delta)
        return np.concatenate([prompt.positions[:, start:], later], axis=1) if start < self.prompt_tokens else later

    def missing_items(self) -> list[ItemFacts]:
        """Facts of the media with rows still to be planned, in order, each once."""
        found: dict[ItemKey, ItemFacts] = {}
        for span in self.spans:
            if span.end > self.num_planned:
                found.setdefault(span.facts.key, span.facts)
        return list(found.values())

    def count_prefill(self, end: int) -> None:
        """Rows [num_planned, end) are about to be prefilled."""
        self.prefilled_tokens += end - self.num_planned
        self.prefilled_media_tokens += self.media_tokens_in(self.num_planned, end)

    def media_tokens_in(self, start: int, end: int) -> int:
        """Placeholder rows among rows [start, end)."""
        return sum(max(0, min(span.end, end) - max(span.start, start)) for span in self.spans)


_counted = np.empty((3, 0), dtype=np.int32)


def text_positions(start: int, end: int) -> npt.NDArray[np.int32]:
    """int32 [3, end - start], read-only: start, start + 1, ... three times. A view: each decode row takes one."""
    global _counted
    if end > _counted.shape[1]:
        _counted = np.broadcast_to(np.arange(2 * end, dtype=np.int32), (3, 2 * end))
    return _counted[:, start:end]
