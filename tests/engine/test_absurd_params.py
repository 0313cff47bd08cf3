"""What the engine's own types let through can be computed with, by whichever door it comes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from engine_support import running_engine

from prism_server.engine.messages import LARGEST_INT, MAX_STOP_TOKEN_IDS, SamplingParams
from prism_server.engine.packet import Packet
from prism_server.engine.plan import SlotStart
from prism_server.engine.sampler import Draw, Sampler
from prism_server.errors import BadRequest
from prism_server.ops.torch_ops import TorchOps
from prism_server.prompt import detokenise

HUGE, INF, NAN = 10**400, float("inf"), float("nan")
VOCAB_SIZE = 8
INTEGERS = ("max_tokens", "min_tokens", "top_k", "seed", "logprobs", "n")
FLOATS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
LARGEST: dict[str, Any] = {
    "top_k": LARGEST_INT,
    "temperature": 100.0,
    "top_p": 5e-324,
    "min_p": 1.0,
    "repetition_penalty": 100.0,
    "presence_penalty": -2.0,
    "frequency_penalty": 2.0,
    "seed": 2**63 - 1,
    "logprobs": 20,
    "n": 16,
    "min_tokens": 6,
    "stop": tuple(f"{i:x}" * 1024 for i in range(16)),
    "stop_token_ids": frozenset(range(LARGEST_INT - 255, LARGEST_INT + 1)),
}


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [HUGE, -HUGE, 2**63, -(2**63) - 1, INF, NAN])
def test_an_integer_out_of_all_bounds_is_refused(name: str, value: float) -> None:
    params: dict[str, Any] = {"max_tokens": 9, name: value}
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**params)
    assert caught.value.param == ("top_logprobs" if name == "logprobs" else name)


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [HUGE, -HUGE, 1e308, -1e308, INF, -INF, NAN])
def test_a_float_out_of_all_bounds_is_refused(name: str, value: float) -> None:
    params: dict[str, Any] = {"max_tokens": 9, name: value}
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**params)
    assert caught.value.param == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stop", ("",)),
        ("stop", ("x" * 1025,)),
        ("stop", ("x",) * 17),
        ("stop_token_ids", frozenset(range(MAX_STOP_TOKEN_IDS + 1))),
        ("stop_token_ids", frozenset((-1,))),
        ("stop_token_ids", frozenset((HUGE,))),
        ("max_tokens", LARGEST_INT + 1),
        ("top_k", LARGEST_INT + 1),
    ],
)
def test_what_would_cost_every_token_time_is_refused(name: str, value: Any) -> None:
    params: dict[str, Any] = {"max_tokens": 9, name: value}
    with pytest.raises(BadRequest) as caught:
        SamplingParams(**params)
    assert caught.value.param == name


@pytest.mark.parametrize("top_k", [0, VOCAB_SIZE, VOCAB_SIZE + 1, LARGEST_INT])
def test_a_top_k_beyond_the_vocabulary_is_all_of_it(top_k: int) -> None:
    sampler = sampler_of([SamplingParams(max_tokens=9, temperature=1.0, top_k=top_k)])
    packet = Packet(torch.zeros(1024, dtype=torch.int64))
    packet.begin(0)
    work = sampler.prepare([Draw(0, 0)], packet)
    assert work is not None
    assert work.random is not None
    packet.send()
    assert packet.tensor(work.random.numbers)[0, 1].item() == VOCAB_SIZE


def test_each_row_below_min_tokens_blocks_its_own_ids() -> None:
    params = [
        SamplingParams(max_tokens=9, min_tokens=3, stop_token_ids=frozenset((5, 2))),
        SamplingParams(max_tokens=9, temperature=1.0),
        SamplingParams(max_tokens=9, min_tokens=3),
    ]
    packet = Packet(torch.zeros(1024, dtype=torch.int64))
    packet.begin(0)
    work = sampler_of(params).prepare([Draw(slot, 0) for slot in range(3)], packet)
    assert work is not None
    assert work.blocked is not None
    assert work.blocked.T.tolist() == [[0, 2], [0, 5], [0, 7], [2, 7]]


def test_the_largest_values_are_served_beside_a_stream_that_loses_nothing() -> None:
    with running_engine() as driver:
        mate = driver.submit(["Hello!"], 40, ignore_eos=True)
        largest = driver.submit(["Hello!"], 6, **LARGEST).wait()
        assert largest.error is None
        assert [len(largest.samples[i]) for i in range(16)] == [6] * 16
        assert mate.wait().error is None
        assert len(mate.tokens) == 40
        assert driver.engine.fault is None


def test_the_samples_of_a_request_share_the_tables_of_its_stop_strings() -> None:
    stops = ("a stop that no other test has", "and one more")
    with running_engine() as driver:
        before = detokenise._fallbacks.cache_info().misses
        driver.ask(["Hello!"], 4, n=8, stop=stops)
        assert detokenise._fallbacks.cache_info().misses == before + len(stops)


def sampler_of(params: list[SamplingParams]) -> Sampler:
    """A slot for each."""
    sampler = Sampler(VOCAB_SIZE, torch.device("cpu"), [7], TorchOps(), len(params))
    for slot, one in enumerate(params):
        sampler.start(SlotStart(slot, one, 0, np.zeros(1, dtype=np.int32)))
    return sampler
