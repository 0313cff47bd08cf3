"""What a request costs a pod, in milliseconds: a step, its prefill, the vision encoder, its part of the decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one pod. The defaults are those of the 8B model on an H200; what a pod has measured replaces them."""

    base_ms: float = 5.0
    """One step: a read of the weights."""
    ms_per_token: float = 0.03
    """Prefill of one prompt token."""
    ms_per_patch: float = 0.004
    """All blocks of the vision encoder for one patch."""
    ms_per_answer_token: float = 0.06
    """What one more sequence adds to a decode step."""

    def __post_init__(self) -> None:
        if min(self.base_ms, self.ms_per_token, self.ms_per_patch, self.ms_per_answer_token) < 0:
            raise ValueError(f"costs must not be negative: {self}")

    def first_token_ms(self, uncached_tokens: int, uncached_patches: int) -> float:
        """From the request's turn to its first token."""
        return self.base_ms + uncached_tokens * self.ms_per_token + uncached_patches * self.ms_per_patch

    def backlog_ms(self, uncached_tokens: int) -> float:
        """Of tokens that other requests have to compute; most are picture tokens, of four patches each."""
        return uncached_tokens * (self.ms_per_token + PATCHES_PER_TOKEN * self.ms_per_patch)

    def answer_ms(self, answer_tokens: int | None) -> float:
        """A request's share of the decode steps; `answer_tokens` is its limit, which few answers reach."""
        likely = USUAL_ANSWER_TOKENS if answer_tokens is None else min(answer_tokens, USUAL_ANSWER_TOKENS)
        return likely * self.ms_per_answer_token


BELIEVED_FACTOR = 2.0


def believed(own: float, measured: Sequence[float]) -> float:
    """What a pod has measured, within a factor of what all of them have (its own is one of `measured`).

    Pods of one deployment run on like cards. A stall in one short chunk shows in a pod's figure for long, and would
    send questions about small pictures away from where they are.
    """
    usual = median(measured)
    return min(max(own, usual / BELIEVED_FACTOR), usual * BELIEVED_FACTOR)


PATCHES_PER_TOKEN = 4
USUAL_ANSWER_TOKENS = 128
