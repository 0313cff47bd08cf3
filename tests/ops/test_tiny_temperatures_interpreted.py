"""Temperatures at which a number over them is none that float32 has, in Triton's interpreter: the best tokens."""

from __future__ import annotations

from triton_interpreter import DEVICE  # isort: skip  (decides how Triton is imported)

import pytest
import torch

from prism_server.ops.torch_ops import TorchOps
from prism_server.ops.triton import select

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity, in NumPy
VOCAB = 71


@pytest.mark.parametrize("temperature", [1e-30, 1e-37, 1e-38, 4e-39, 1e-300, 5e-324])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [(VOCAB, 1.0, 0.0), (5, 0.9, 0.1)])
def test_a_tiny_temperature_draws_among_the_best_tokens(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    logits[1, [7, 30]] = 9.0
    logits[2, 1:] = float("-inf")
    logits[3] *= 100.0
    numbers = (0.3, 0.7, 0.99, 0.0)
    params = [[temperature, top_k, top_p, min_p, number] for number in numbers]
    settings = torch.tensor(params, dtype=torch.float64, device=DEVICE)
    tokens = select.draw(logits, settings, part_tokens=32, listed_tokens=16, block=16)
    assert tokens.tolist() == TorchOps().draw(logits, settings).tolist()
    assert tokens[1] == 30, "of two equals the second, at 0.7"
