"""Choosing tokens on the device: penalties, temperature, top-k, top-p, min-p, seeds, log-probabilities.

What a row draws depends on its logits, its parameters, its seed and how many tokens it has drawn, never on the batch.
The likeliest token of every row is there already (it is part of the captured graphs); only rows that ask for more are
looked at here. Parameters and random numbers come with the step's packet; the device keeps the penalties' counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from prism_server.engine.messages import SamplingParams, TokenLogprob
from prism_server.engine.packet import Packet, Section
from prism_server.engine.plan import SlotStart
from prism_server.engine.transfers import to_device, to_host
from prism_server.ops.interface import Ops

_MASK = (1 << 64) - 1


def uniform(seed: int, draw: int) -> float:
    """A number in [0, 1) for draw `draw` of a seeded sequence: splitmix64 (Steele et al., OOPSLA 2014), 53 bits."""
    state = (seed * 0x9E3779B97F4A7C15 + (draw + 1) * 0xD1342543DE82EF95) & _MASK
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        state = ((state ^ (state >> shift)) * factor) & _MASK
    return ((state ^ (state >> 31)) >> 11) / float(1 << 53)


@dataclass(frozen=True, eq=False, slots=True)
class _Slot:
    params: SamplingParams
    seed: int
    blocked_ids: npt.NDArray[np.int64]
    """Tokens that may not come before `min_tokens`: the ends of the model and the request's stop ids."""

    @property
    def is_penalised(self) -> bool:
        params = self.params
        return params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0

    def blocks(self, draw: int) -> bool:
        return len(self.blocked_ids) > 0 and draw + 1 < self.params.min_tokens

    def asks_for_more(self, draw: int) -> bool:
        """Whether the likeliest token alone does not do."""
        params = self.params
        return not params.greedy or params.logprobs is not None or self.is_penalised or self.blocks(draw)


@dataclass(frozen=True, slots=True)
class Draw:
    """One drawing row of a step: its slot and how many tokens the sequence has drawn before."""

    slot: int
    index: int


@dataclass(frozen=True, slots=True)
class Group:
    """Some of the rows in question: their places among them, and what each needs to know, a row each."""

    places: Section
    numbers: Section


@dataclass(frozen=True, slots=True)
class SamplingWork:
    """The rows of a step that ask for more, in its packet."""

    rows: Section
    """int64 [R]: places among the step's draws."""
    slots: Section
    penalised: Group | None
    """float64 [n, 3]: repetition, presence, frequency."""
    blocked: npt.NDArray[np.int64] | None
    """int64 [2, n]: a place and a token that may not come there. As many as requests name, so not in the packet."""
    random: Group | None
    """float64 [n, 5]: as `Ops.draw` takes them."""
    logprobs: tuple[int | None, ...]
    """For each of the R rows how many alternatives it asks for."""
    draws: tuple[int, ...]
    """`rows` on the host."""


@dataclass(frozen=True, eq=False, slots=True)
class PendingLogprobs:
    """Log-probabilities on their way to the host. `rows` are places among the draws."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    own: Tensor
    values: Tensor
    ids: Tensor

    def read(self, tokens: Sequence[int]) -> dict[int, TokenLogprob]:
        """By place among the draws, whose `tokens` these are; once the device is there."""
        found = {}
        everything = zip(
            self.rows, self.counts, self.own.tolist(), self.values.tolist(), self.ids.tolist(), strict=True
        )
        for row, count, own, values, ids in everything:
            top = tuple(zip(ids[:count], values[:count], strict=True))
            found[row] = TokenLogprob(tokens[row], own, top)
        return found


class Sampler:
    """Per-slot sampling state. Called by whoever owns the device."""

    def __init__(
        self, vocab_size: int, device: torch.device, eos_token_ids: Sequence[int], ops: Ops, num_slots: int
    ) -> None:
        self._ops = ops
        self._vocab_size = vocab_size
        self._device = device
        self._eos_token_ids = tuple(eos_token_ids)
        self._slots: dict[int, _Slot] = {}
        shape = (num_slots, vocab_size)
        self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=device)
        self._output_counts = torch.zeros(shape, dtype=torch.int32, device=device)

    def start(self, start: SlotStart) -> None:
        """A sequence takes a slot; what was there is forgotten."""
        params = start.params
        ends = () if params.ignore_eos else self._eos_token_ids
        known = {token for token in (*ends, *params.stop_token_ids) if 0 <= token < self._vocab_size}
        blocked = np.array(sorted(known) if params.min_tokens else (), dtype=np.int64)
        slot = _Slot(params, start.seed, blocked)
        self._slots[start.slot] = slot
        if slot.is_penalised:
            seen, counts = self._in_prompt[start.slot], self._output_counts[start.slot]
            seen.zero_().index_fill_(0, to_device(start.prompt_ids.astype(np.int64), self._device), True)
            said = to_device(np.array(start.output_ids, dtype=np.int64), self._device)
            counts.zero_().index_add_(0, said, torch.ones_like(said, dtype=torch.int32))

    def asks_for_more(self, draws: Sequence[Draw]) -> bool:
        """Whether any of the step's draws needs its logits: `prepare` then finds work."""
        return any(self._slots[draw.slot].asks_for_more(draw.index) for draw in draws)

    def prepare(self, draws: Sequence[Draw], packet: Packet) -> SamplingWork | None:
        """What the step's draws need beyond the likeliest token, put into the packet; None: nothing."""
        asking = [
            (row, draw, slot)
            for row, (draw, slot) in enumerate((draw, self._slots[draw.slot]) for draw in draws)
            if slot.asks_for_more(draw.index)
        ]
        if not asking:
            return None
        penalised = [place for place, (_, _, slot) in enumerate(asking) if slot.is_penalised]
        random = [place for place, (_, _, slot) in enumerate(asking) if not slot.params.greedy]
        blocked = {place: slot.blocked_ids for place, (_, draw, slot) in enumerate(asking) if slot.blocks(draw.index)}
        rows = tuple(row for row, _, _ in asking)
        return SamplingWork(
            packet.append(np.array(rows, dtype=np.int64)),
            packet.append(np.array([draw.slot for _, draw, _ in asking], dtype=np.int64)),
            _group(packet, penalised, [_penalties(asking[place][2].params) for place in penalised]),
            _blocked(blocked) if blocked else None,
            _group(packet, random, [self._draw_numbers(asking[place][2], asking[place][1]) for place in random]),
            tuple(slot.params.logprobs for _, _, slot in asking),
            rows,
        )

    def _draw_numbers(self, slot: _Slot, draw: Draw) -> list[float]:
        params = slot.params
        top_k = min(params.top_k or self._vocab_size, self._vocab_size)
        return [params.temperature, top_k, params.top_p, params.min_p, uniform(slot.seed, draw.index)]

    def apply(self, work: SamplingWork, packet: Packet, logits: Tensor, tokens: Tensor, last_tokens: Tensor) -> None:
        """Replace the tokens of the rows that ask for more: in `tokens` int64 [D], and in `last_tokens` by slot.

        logits float32 [D, vocabulary], which stay as they are.
        """
        rows, slots = packet.tensor(work.rows), packet.tensor(work.slots)
        adjusted = logits[rows]
        if work.penalised is not None:
            places, numbers = _tensors(packet, work.penalised)
            seen, counts = self._in_prompt[slots[places]], self._output_counts[slots[places]]
            adjusted[places] = _penalise(adjusted[places], seen, counts, numbers.float())
        if work.blocked is not None:
            places, ids = to_device(work.blocked, self._device)
            adjusted.index_put_((places, ids), adjusted.new_full((), -torch.inf))  # a host number would be copied
        chosen = self._ops.argmax(adjusted)
        if work.random is not None:
            places, numbers = _tensors(packet, work.random)
            chosen[places] = self._ops.draw(adjusted[places], numbers)
        tokens[rows] = chosen
        last_tokens[slots] = chosen
        if work.penalised is not None:
            places = packet.tensor(work.penalised.places)
            said = slots[places] * self._vocab_size + chosen[places]
            self._output_counts.view(-1).index_add_(0, said, torch.ones_like(said, dtype=torch.int32))

    def logprobs(self, work: SamplingWork, packet: Packet, logits: Tensor, tokens: Tensor) -> PendingLogprobs | None:
        """Of the model's own distribution, before penalties and temperature; only for rows that ask."""
        asked = [(row, count) for row, count in zip(work.draws, work.logprobs, strict=True) if count is not None]
        if not asked:
            return None
        rows, counts = zip(*asked, strict=True)
        index = to_device(np.array(rows, dtype=np.int64), self._device)
        logprobs = logits[index].log_softmax(dim=-1)
        own = logprobs.gather(1, tokens[index].unsqueeze(1)).squeeze(1)
        values, ids = logprobs.topk(max(counts), dim=-1)
        return PendingLogprobs(rows, counts, to_host(own), to_host(values), to_host(ids))


def _group(packet: Packet, places: list[int], numbers: list[list[float]]) -> Group | None:
    if not places:
        return None
    return Group(packet.append(np.array(places, dtype=np.int64)), packet.append(np.array(numbers, dtype=np.float64)))


def _blocked(ids_of: Mapping[int, npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """int64 [2, n]: places, each as often as it has ids, and the ids."""
    places = np.repeat(np.array(list(ids_of), dtype=np.int64), [len(ids) for ids in ids_of.values()])
    return np.stack([places, np.concatenate(list(ids_of.values()))])


def _tensors(packet: Packet, group: Group) -> tuple[Tensor, Tensor]:
    return packet.tensor(group.places), packet.tensor(group.numbers)


def _penalties(params: SamplingParams) -> list[float]:
    return [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]


def _penalise(logits: Tensor, in_prompt: Tensor, output_counts: Tensor, numbers: Tensor) -> Tensor:
    """Repetition (CTRL, Keskar et al. 2019: of prompt and output), presence and frequency (OpenAI: of the output).

    logits, in_prompt, output_counts [n, vocabulary]; numbers [n, 3].
    """
    repetition, presence, frequency = (number.unsqueeze(1) for number in numbers.unbind(1))
    said = output_counts > 0
    factor = torch.where(in_prompt | said, repetition, 1.0)
    penalised = torch.where(logits > 0, logits / factor, logits * factor)
    return penalised - frequency * output_counts - presence * said
