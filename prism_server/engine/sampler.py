"""Choosing tokens on the device: penalties, temperature, top-k, top-p, min-p, seeds, log-probabilities.

What a row draws depends on its logits, its parameters, its seed and how many tokens it has drawn, never on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from prism_server.engine.messages import SamplingParams, TokenLogprob
from prism_server.engine.plan import SlotStart
from prism_server.ops.interface import Ops

_MASK = (1 << 64) - 1


def uniform(seed: int, draw: int) -> float:
    """A number in [0, 1) for draw `draw` of a seeded sequence: splitmix64 (Steele et al., OOPSLA 2014), 53 bits."""
    state = (seed * 0x9E3779B97F4A7C15 + (draw + 1) * 0xD1342543DE82EF95) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return ((state ^ (state >> 31)) >> 11) / float(1 << 53)


@dataclass(slots=True)
class _SlotState:
    params: SamplingParams
    seed: int
    blocked_ids: list[int] = field(default_factory=list)
    """Tokens that may not come before `min_tokens`: the ends of the model and the request's stop ids."""
    counts: Tensor | None = None
    """int32 [2, vocabulary]: occurrences in the prompt, in the output; only where a penalty needs them."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawing row of a step: its slot and how many tokens the sequence has drawn before."""

    slot: int
    index: int


class Sampler:
    """Per-slot sampling state. Called by whoever owns the device."""

    def __init__(self, vocab_size: int, device: torch.device, eos_token_ids: Sequence[int], ops: Ops) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._device = device
        self._eos_token_ids = list(eos_token_ids)
        self._slots: dict[int, _SlotState] = {}

    def start(self, start: SlotStart) -> None:
        """A sequence takes a slot; what was there is forgotten."""
        params = start.params
        state = _SlotState(params, start.seed)
        if params.min_tokens:
            ends = [] if params.ignore_eos else self._eos_token_ids
            state.blocked_ids = sorted({*ends, *params.stop_token_ids})
        if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
            prompt = torch.from_numpy(start.prompt_ids.astype("int64"))
            output = torch.tensor(start.output_ids, dtype=torch.int64)
            counts = [torch.bincount(ids, minlength=self._vocab_size) for ids in (prompt, output)]
            state.counts = torch.stack(counts).to(self._device, torch.int32)
        self._slots[start.slot] = state

    def sample(self, logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, list[TokenLogprob | None]]:
        """logits float32 [R, vocabulary], one row a draw -> tokens int64 [R] on the device, log-probabilities."""
        states = [self._slots[draw.slot] for draw in draws]
        adjusted = self._adjust(logits, states, draws)
        tokens = self._ops.argmax(adjusted)
        random_rows = [row for row, state in enumerate(states) if not state.params.greedy]
        if random_rows:
            rows = torch.tensor(random_rows, device=self._device)
            chosen = [(states[row].params, uniform(states[row].seed, draws[row].index)) for row in random_rows]
            tokens[rows] = self._draw(adjusted[rows], chosen)
        for row, state in enumerate(states):
            if state.counts is not None:
                state.counts[1].index_add_(0, tokens[row : row + 1], torch.ones_like(state.counts[1][:1]))
        return tokens, self._logprobs(logits, tokens, states)

    def _adjust(self, logits: Tensor, states: Sequence[_SlotState], draws: Sequence[Draw]) -> Tensor:
        """Penalties and blocked ends; rows that have neither keep their logits."""
        changed = logits
        for row, (state, draw) in enumerate(zip(states, draws, strict=True)):
            blocked = state.blocked_ids if draw.index + 1 < state.params.min_tokens else []
            if state.counts is None and not blocked:
                continue
            if changed is logits:
                changed = logits.clone()
            if state.counts is not None:
                changed[row] = _penalise(changed[row], state.counts, state.params)
            if blocked:
                changed[row, torch.tensor(blocked, device=self._device)] = -torch.inf
        return changed

    def _draw(self, logits: Tensor, chosen: Sequence[tuple[SamplingParams, float]]) -> Tensor:
        """logits [R, vocabulary] of the rows that are drawn at random -> tokens int64 [R]."""
        params = [[p.temperature, p.top_k or self._vocab_size, p.top_p, p.min_p, where] for p, where in chosen]
        return self._ops.draw(logits, torch.tensor(params, dtype=torch.float64, device=self._device))

    def _logprobs(self, logits: Tensor, tokens: Tensor, states: Sequence[_SlotState]) -> list[TokenLogprob | None]:
        """Of the model's own distribution, before penalties and temperature; only for rows that ask."""
        found: list[TokenLogprob | None] = [None] * len(states)
        rows = [row for row, state in enumerate(states) if state.params.logprobs is not None]
        if not rows:
            return found
        index = torch.tensor(rows, device=self._device)
        logprobs = logits[index].log_softmax(dim=-1)
        own = logprobs.gather(1, tokens[index].unsqueeze(1)).squeeze(1).tolist()
        most = max(states[row].params.logprobs or 0 for row in rows)
        values, ids = logprobs.topk(most, dim=-1)
        for n, (row, top_values, top_ids) in enumerate(zip(rows, values.tolist(), ids.tolist(), strict=True)):
            count = states[row].params.logprobs or 0
            top = tuple(zip(top_ids[:count], top_values[:count], strict=True))
            found[row] = TokenLogprob(int(tokens[row]), own[n], top)
        return found


def _penalise(logits: Tensor, counts: Tensor, params: SamplingParams) -> Tensor:
    """Repetition (CTRL, Keskar et al. 2019: of prompt and output), frequency and presence (OpenAI: of the output)."""
    seen = (counts.sum(dim=0) > 0).to(logits.dtype)
    factor = 1.0 + seen * (params.repetition_penalty - 1.0)
    penalised = torch.where(logits > 0, logits / factor, logits * factor)
    output = counts[1].to(logits.dtype)
    return penalised - params.frequency_penalty * output - params.presence_penalty * (output > 0)
