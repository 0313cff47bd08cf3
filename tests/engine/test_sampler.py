"""The sampler alone, on vocabularies that fit in the head, against the plain formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from prism_server.engine.messages import SamplingParams, TokenLogprob
from prism_server.engine.packet import Packet
from prism_server.engine.plan import SlotStart
from prism_server.engine.sampler import Draw, Sampler, uniform
from prism_server.ops.torch_ops import TorchOps

LOGITS = [1.5, 2.0, 1.5, 0.5, 0.0, -1.0, -3.0, -30.0]
NUM_DRAWS = 4000
EOS = 7
NUM_SLOTS = 8


def sampler_of(
    params: Sequence[SamplingParams], prompt: Sequence[int] = (), output: Sequence[int] = (), vocab_size: int = 8
) -> Sampler:
    """One slot for each of `params`, with its number as the seed."""
    sampler = Sampler(vocab_size, torch.device("cpu"), [EOS], TorchOps(), NUM_SLOTS)
    for slot, one in enumerate(params):
        sampler.start(SlotStart(slot, one, slot, np.array(prompt, dtype=np.int32), tuple(output)))
    return sampler


def sample(sampler: Sampler, logits: Tensor, draws: Sequence[Draw]) -> tuple[Tensor, list[TokenLogprob | None]]:
    """As a step does it: the likeliest tokens are there, and the rows that ask for more are changed."""
    packet = Packet(torch.zeros(1 << 14, dtype=torch.int64))
    packet.begin(0)
    work = sampler.prepare(draws, packet)
    packet.send()
    tokens, last_tokens = logits.argmax(dim=-1), torch.zeros(NUM_SLOTS, dtype=torch.int64)
    last_tokens[[draw.slot for draw in draws]] = tokens
    pending = None
    if work is not None:
        sampler.apply(work, packet, logits, tokens, last_tokens)
        pending = sampler.logprobs(work, packet, logits, tokens)
    found = {} if pending is None else pending.read(tokens.tolist())
    if len({draw.slot for draw in draws}) == len(draws):
        assert last_tokens[[draw.slot for draw in draws]].tolist() == tokens.tolist()
    return tokens, [found.get(row) for row in range(len(draws))]


def draw_many(**options: Any) -> Tensor:
    """Counts of NUM_DRAWS draws from LOGITS: of one sequence, draw after draw."""
    sampler = sampler_of([SamplingParams(max_tokens=1, **options)])
    logits = torch.tensor([LOGITS]).expand(100, -1)
    tokens = [sample(sampler, logits, [Draw(0, i + n) for n in range(100)])[0] for i in range(0, NUM_DRAWS, 100)]
    return torch.cat(tokens).bincount(minlength=len(LOGITS))


def expected_shares(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> list[float]:
    """In the order of the definitions: temperature, the k most likely, the nucleus among them, the share of the top."""
    weights = [math.exp((logit - max(LOGITS)) / temperature) for logit in LOGITS]
    ranked = sorted(range(len(LOGITS)), key=lambda i: -LOGITS[i])[: top_k or None]
    total = sum(weights[i] for i in ranked)
    kept, before = [], 0.0
    for i in ranked:
        share = weights[i] / total
        if before < top_p and share >= min_p * weights[ranked[0]] / total:
            kept.append(i)
        before += share
    rest = sum(weights[i] for i in kept)
    return [weights[i] / rest if i in kept else 0.0 for i in range(len(LOGITS))]


def check_shares(counts: Tensor, shares: Sequence[float]) -> None:
    """Pearson's chi-square within five deviations of its mean; what has no share never comes."""
    assert counts.sum() == NUM_DRAWS
    pairs = [(int(count), share * NUM_DRAWS) for count, share in zip(counts, shares, strict=True)]
    assert all(count == 0 for count, expected in pairs if expected == 0)
    frequent = [(count, expected) for count, expected in pairs if expected >= 5]
    statistic = sum((count - expected) ** 2 / expected for count, expected in frequent)
    freedom = len(frequent) - 1
    assert statistic <= freedom + 5 * math.sqrt(2 * max(freedom, 1)), (counts, shares)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_k": 2},  # cuts between two that are as likely: the lower id stays
        {"temperature": 1.0, "top_k": 1000},
        {"temperature": 1.0, "top_p": 0.6},
        {"temperature": 1.0, "top_p": 1e-9},
        {"temperature": 1.0, "min_p": 0.2},
        {"temperature": 1.0, "min_p": 1.0},
        {"temperature": 2.0, "top_k": 5, "top_p": 0.8, "min_p": 0.3},
        {"temperature": 0.01},
        {"temperature": 5e-324},  # the least number above 0
        {"temperature": 100.0},
    ],
    ids=str,
)
def test_draws_follow_the_distribution_that_the_options_describe(options: dict[str, Any]) -> None:
    check_shares(draw_many(seed=0, **options), expected_shares(**options))


def test_a_nucleus_ends_with_the_token_that_reaches_top_p() -> None:
    shares = expected_shares(1.0, top_p=0.5)
    assert [share > 0 for share in shares] == [True, True, False, False, False, False, False, False]
    check_shares(draw_many(temperature=1.0, top_p=0.5), shares)


def test_neighbouring_seeds_and_neighbouring_draws_are_independent() -> None:
    """Samples of one request use seeds side by side: all pairs of quarters of [0, 1) come equally often."""
    for pairs in (
        [(uniform(seed, 0), uniform(seed + 1, 0)) for seed in range(NUM_DRAWS)],
        [(uniform(3, draw), uniform(3, draw + 1)) for draw in range(NUM_DRAWS)],
        [(uniform(-(2**63) + seed, 5), uniform(seed, 5)) for seed in range(NUM_DRAWS)],
    ):
        assert all(0 <= u < 1 for pair in pairs for u in pair)
        cells = torch.tensor([int(4 * a) * 4 + int(4 * b) for a, b in pairs]).bincount(minlength=16)
        check_shares(cells, [1 / 16] * 16)


def test_what_a_row_draws_does_not_depend_on_its_batch() -> None:
    options: list[dict[str, Any]] = [
        {"temperature": 1.0},
        {},
        {"temperature": 0.7, "top_p": 0.8, "frequency_penalty": 0.5},
        {"temperature": 2.0, "min_p": 0.1, "repetition_penalty": 1.3},
        {"temperature": 1.0, "logprobs": 3},
    ]
    params = [SamplingParams(max_tokens=9, **one) for one in options]
    logits = torch.randn((20, len(params), len(LOGITS)), generator=torch.Generator().manual_seed(1))
    together = sampler_of(params, prompt=[0, 1])
    draws = [[Draw(slot, step) for slot in range(len(params))] for step in range(20)]
    batched = torch.stack([sample(together, logits[step], draws[step])[0] for step in range(20)])
    for slot in range(len(params)):
        alone = sampler_of(params, prompt=[0, 1])
        rows = logits[:, slot : slot + 1]
        tokens = torch.cat([sample(alone, row, [Draw(slot, step)])[0] for step, row in enumerate(rows)])
        assert torch.equal(tokens, batched[:, slot])


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.8},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 0.9},
        {"frequency_penalty": 0.4},
        {"frequency_penalty": -0.3, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_penalties_are_their_formulas(options: dict[str, float]) -> None:
    """Repetition counts prompt and output; presence and frequency only the output. A slot may start in mid-answer."""
    prompt, output = [0, 0, 3], [1, 1, 2]
    vocab_size = 32
    sampler = sampler_of([SamplingParams(max_tokens=99, **options)], prompt, output, vocab_size)
    logits = torch.randn((60, vocab_size), generator=torch.Generator().manual_seed(2))
    changed = 0
    for step, row in enumerate(logits):
        adjusted = []
        for token, logit in enumerate(row.tolist()):
            factor = options.get("repetition_penalty", 1.0) if token in prompt + output else 1.0
            value = logit / factor if logit > 0 else logit * factor
            value -= options.get("frequency_penalty", 0.0) * output.count(token)
            adjusted.append(value - options.get("presence_penalty", 0.0) * (token in output))
        tokens, _ = sample(sampler, row.unsqueeze(0), [Draw(0, len(output))])
        assert int(tokens) == max(range(vocab_size), key=adjusted.__getitem__), step
        changed += int(tokens) != int(row.argmax())
        output.append(int(tokens))
    assert changed > 5


def test_ends_are_blocked_below_min_tokens_and_not_after() -> None:
    params = [
        SamplingParams(max_tokens=9, min_tokens=3),
        SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=frozenset((6,))),
        SamplingParams(max_tokens=9, min_tokens=3, ignore_eos=True),
        SamplingParams(max_tokens=9, min_tokens=3, temperature=0.01),
        SamplingParams(max_tokens=9),
    ]
    sampler = sampler_of(params)
    logits = torch.arange(8.0).repeat(len(params), 1)  # 7, the end of the model, then 6
    for index, expected in ((0, [6, 5, 7, 6, 7]), (1, [6, 5, 7, 6, 7]), (2, [7, 7, 7, 7, 7])):
        tokens, _ = sample(sampler, logits, [Draw(slot, index) for slot in range(len(params))])
        assert tokens.tolist() == expected
    assert logits[0].tolist() == list(range(8))  # what the model said is not written over


def test_logprobs_are_the_models_own_before_penalties_and_temperature() -> None:
    params = [
        SamplingParams(max_tokens=9, logprobs=3, temperature=0.3, presence_penalty=2.0),
        SamplingParams(max_tokens=9),
        SamplingParams(max_tokens=9, logprobs=0, repetition_penalty=5.0),
    ]
    sampler = sampler_of(params, prompt=[1], output=[1])
    tokens, logprobs = sample(sampler, torch.tensor([LOGITS] * 3), [Draw(slot, 1) for slot in range(3)])
    expected = torch.tensor(LOGITS).log_softmax(0).tolist()
    first, none, last = logprobs
    assert none is None
    assert first is not None
    assert last is not None
    assert [token for token, _ in first.top][:1] == [1]
    assert [value for _, value in first.top] == pytest.approx(sorted(expected, reverse=True)[:3])
    assert last.top == ()
    for token, found in ((int(tokens[0]), first), (int(tokens[2]), last)):
        assert found.token_id == token
        assert found.logprob == pytest.approx(expected[token])
    assert int(tokens[2]) != 1


def test_a_slot_forgets_who_had_it_before() -> None:
    sampler = sampler_of([SamplingParams(max_tokens=9, presence_penalty=2.0, min_tokens=9)], output=[1])
    logits = torch.tensor([LOGITS])
    assert sample(sampler, logits, [Draw(0, 1)])[0].tolist() == [0]
    sampler.start(SlotStart(0, SamplingParams(max_tokens=9), 0, np.array([0], dtype=np.int32)))
    assert sample(sampler, logits, [Draw(0, 0)])[0].tolist() == [1]


def test_stop_ids_beyond_the_vocabulary_are_no_tokens_that_could_be_blocked() -> None:
    params = SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=frozenset((6, 8, 1 << 30)))
    tokens, _ = sample(sampler_of([params]), torch.arange(8.0).unsqueeze(0), [Draw(0, 0)])
    assert tokens.tolist() == [5]


def test_rows_that_want_the_likeliest_token_alone_cost_nothing() -> None:
    params = [
        SamplingParams(max_tokens=9, min_tokens=2),
        SamplingParams(max_tokens=9, top_k=3, stop_token_ids=frozenset((1,))),
    ]
    packet = Packet(torch.zeros(256, dtype=torch.int64))
    packet.begin(0)
    assert sampler_of(params).prepare([Draw(0, 1), Draw(1, 0)], packet) is None
    assert packet.num_words == 0
