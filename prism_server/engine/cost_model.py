"""How much work a step may hold: a time budget, turned into tokens and encoder blocks by what steps have cost."""

from __future__ import annotations

from dataclasses import dataclass

from prism_server.capacity.plan import ENCODED_PATCHES

SMOOTHING = 0.2
"""Weight of the newest observation."""
MIN_CHUNK_TOKENS = 64
"""The prefills beside decodes always get this many tokens together, so that they end."""
MAX_STEP_PATCHES = ENCODED_PATCHES
"""Patches encoded in one step, unless a single item has more: the page plan has room for so many."""
LAUNCH_BOUND_TOKENS = 1024
"""An eager step of fewer rows keeps the host longer than a GPU (16 ms for 36 layers beside an H200)."""
SHORT_CHUNK_TOKENS = 256
"""Rows that hide behind the reading of the weights cost little; what they cost says nothing about longer chunks."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What a completed step did, and its measured times. `eager`: its language rows were no replay of a graph."""

    num_decodes: int
    num_prefill_tokens: int
    patch_blocks: int
    """Patches that the encoder took through a block, summed over the blocks."""
    language_ms: float
    encode_ms: float
    eager: bool = True


@dataclass(slots=True)
class StepBudget:
    """What is left of a step beside its decodes. `ms` is None when nothing decodes: then only sizes bound the step."""

    tokens: int
    patches: int
    ms: float | None = None
    ms_per_token: float = 0.0
    ms_per_patch_block: float = 0.0
    prefilled: int = 0
    encodes: int = 0

    @property
    def chunk_tokens(self) -> int:
        """Tokens that the next prefill chunk may have."""
        if self.ms is None or self.ms_per_token == 0.0:
            return self.tokens
        affordable = int(self.ms / self.ms_per_token)
        return min(self.tokens, max(affordable, MIN_CHUNK_TOKENS - self.prefilled))

    def take_tokens(self, num_tokens: int) -> None:
        self.tokens -= num_tokens
        self.prefilled += num_tokens
        self._spend(num_tokens * self.ms_per_token)

    def may_encode(self, num_patches: int) -> bool:
        """Whether another item may start in this step; the first one always may."""
        return not self.encodes or self.patches >= num_patches

    def take_blocks(self, num_patches: int, blocks_left: int) -> int:
        """Vision blocks of an item that this step runs: all, or what the time allows, at least one a step."""
        if not self.may_encode(num_patches):
            return 0
        blocks, block_ms = blocks_left, num_patches * self.ms_per_patch_block
        if self.ms is not None and block_ms > 0.0:
            blocks = min(blocks_left, max(int(self.ms / block_ms), 0 if self.encodes else 1))
        if blocks > 0:
            self.encodes += 1
            self.patches -= num_patches
            self._spend(blocks * block_ms)
        return max(0, blocks)

    def _spend(self, ms: float) -> None:
        if self.ms is not None:
            self.ms = max(0.0, self.ms - ms)


class CostModel:
    """A step costs a base (one read of the weights), so much a prefill token and so much a patch and vision block."""

    def __init__(self, step_budget_ms: float, max_step_tokens: int, max_replayed_tokens: int = 0) -> None:
        """`max_replayed_tokens`: rows of the largest graph, which only as many decodes exceed; 0: no graphs.

        A longer step would be launched kernel by kernel, and each launch waits for Python's lock: where many requests
        come at once the device would be idle for most of it. Two graphs are as fast as one such step alone.
        """
        self._budget_ms = step_budget_ms
        self._max_tokens = min(max_step_tokens, max_replayed_tokens or max_step_tokens)
        self.base_ms = 0.0
        self.ms_per_token = 0.0
        self.ms_per_patch_block = 0.0
        self._replays = False

    def budget(self, num_decodes: int) -> StepBudget:
        """The next step's budget; its decodes are already taken out."""
        if num_decodes == 0:
            return StepBudget(self._max_tokens, MAX_STEP_PATCHES)
        tokens = max(1, self._max_tokens - num_decodes)
        spare_ms = max(0.0, self._budget_ms - self.base_ms)
        return StepBudget(tokens, MAX_STEP_PATCHES, spare_ms, self.ms_per_token, self.ms_per_patch_block)

    def observe(self, seen: Observation) -> None:
        """Learns from a completed step.

        Where there are graphs, a small step without one lasts as long as the host takes to launch it, and says nothing.
        """
        num_tokens = seen.num_prefill_tokens
        has_rows = seen.num_decodes or num_tokens
        self._replays = self._replays or bool(has_rows and not seen.eager)
        if seen.patch_blocks:
            self.ms_per_patch_block = self._blend(self.ms_per_patch_block, seen.encode_ms / seen.patch_blocks)
        if seen.eager and self._replays and num_tokens < LAUNCH_BOUND_TOKENS:
            return
        if num_tokens >= MIN_CHUNK_TOKENS:
            ms_per_token = max(0.0, seen.language_ms - self.base_ms) / num_tokens
            if num_tokens >= SHORT_CHUNK_TOKENS or ms_per_token > self.ms_per_token:
                self.ms_per_token = self._blend(self.ms_per_token, ms_per_token)
        elif seen.num_decodes:
            self.base_ms = self._blend(self.base_ms, seen.language_ms)

    @staticmethod
    def _blend(old: float, new: float) -> float:
        return new if old == 0.0 else old + SMOOTHING * (new - old)
