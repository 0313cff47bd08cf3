"""The head's copy in FP8: how its bytes lie, and how far it is off."""

from __future__ import annotations

import pytest
import torch

from prism_server.errors import StartupError
from prism_server.ops import Fp8Head
from prism_server.ops.fp8_head import CHUNK_ROWS
from prism_server.ops.kv_storage import quantise_rows


def test_the_copy_is_the_quantised_rows_whatever_chunks_they_are_converted_in() -> None:
    weight = torch.randn(2 * CHUNK_ROWS + 5, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    head = Fp8Head.of(weight)
    numbers, scales = quantise_rows(weight)
    assert torch.equal(head.dequantised(), numbers.float() * scales.unsqueeze(1))
    assert head.weight is weight
    assert head.pairs.shape == (len(weight), 32)
    assert head.vocab_size == len(weight)


def test_lower_bytes_are_the_first_half_of_the_inputs_and_upper_bytes_the_second() -> None:
    weight = torch.zeros(1, 64)
    weight[0, [3, 35]] = torch.tensor([448.0, -1.0])
    assert Fp8Head.of(weight).pairs[0, 3].item() & 0xFFFF == 0xB87E  # -1 is 0xB8 in E4M3, 448 is 0x7E
    assert Fp8Head.of(weight).pairs.count_nonzero() == 1


def test_the_copy_is_off_by_a_sixteenth_of_a_number_at_most_or_by_the_smallest_step_of_its_row() -> None:
    weight = torch.randn(50, 96, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, 50).unsqueeze(1)
    weight[7, 3] = 1e5
    weight[8] = 0.0
    head = Fp8Head.of(weight)
    bound = torch.maximum(weight.abs() * 2.0**-4, head.scales.unsqueeze(1) * 2.0**-10) * (1 + 1e-5)
    assert ((head.dequantised() - weight).abs() <= bound).all()


def test_a_hidden_size_that_cannot_be_cut_is_refused_in_one_line() -> None:
    with pytest.raises(StartupError, match="hidden size 80 is no multiple of 32"):
        Fp8Head.of(torch.zeros(4, 80))
