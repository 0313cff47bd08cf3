"""Choosing tokens without sorting the vocabulary, in Triton's interpreter: the tokens that sorting gives."""

from __future__ import annotations

from triton_interpreter import DEVICE  # isort: skip  (decides how Triton is imported)

import pytest
import torch
from torch import Tensor

from prism_server.ops.torch_ops import TorchOps
from prism_server.ops.triton import select

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity, in NumPy
VOCAB = 71
INF = float("inf")
WEIGHT_ROUNDING, NEAR = 2.0**-24, 4
"""A number within so many roundings of a boundary between two tokens may fall on either."""


def rows_of_all_kinds() -> Tensor:
    """Peaked, flat, with equals, all equal, and with blocked tokens: float32 [7, VOCAB]."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(7, VOCAB, generator=generator)
    noise *= torch.tensor([1.0, 8.0, 0.01, 1.0, 1.0, 0.0, 3.0]).unsqueeze(1)
    noise[3] = (noise[3] * 2).round() / 2
    noise[4, torch.randperm(VOCAB, generator=generator)[:60]] = -INF
    noise[6, 1:] = -INF
    return noise.to(DEVICE)


def draw(logits: Tensor, settings: list[tuple[float, float, float, float, float]], listed: int = 16) -> list[int]:
    params = torch.tensor(settings, dtype=torch.float64, device=DEVICE)
    return select.draw(logits, params, part_tokens=32, listed_tokens=listed, block=16).tolist()


def tokens_near(logits: Tensor, settings: list[tuple[float, float, float, float, float]]) -> list[set[int]]:
    """Of each row what sorting gives for its number, and for those that float32 weights cannot tell from it."""
    params = torch.tensor(settings, dtype=torch.float64, device=DEVICE)
    drawn = []
    for off in range(-NEAR, NEAR + 1):
        params[:, 4] = torch.tensor(
            [number + off * WEIGHT_ROUNDING for *_, number in settings], dtype=torch.float64
        ).clamp(0.0, 1.0)
        drawn.append(TorchOps().draw(logits, params).tolist())
    return [set(tokens) for tokens in zip(*drawn, strict=True)]


def test_the_best_token_is_the_lowest_id_of_the_highest_logits() -> None:
    logits = rows_of_all_kinds()
    assert select.argmax(logits).tolist() == logits.argmax(dim=-1).tolist()
    zeros = torch.full((2, VOCAB), -1.0, device=DEVICE)
    zeros[:, [40, 9, 41]] = torch.tensor([0.0, -0.0, 0.0], device=DEVICE)  # these are equal
    zeros[1] = -INF
    assert select.argmax(zeros).tolist() == [9, 0]


def test_no_rows_give_no_tokens() -> None:
    nothing = torch.empty((0, VOCAB), device=DEVICE)
    assert select.argmax(nothing).tolist() == draw(nothing, []) == []


@pytest.mark.parametrize("listed", [4, 128])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, VOCAB, 1.0, 0.0),
        (0.7, 20, 0.8, 0.0),
        (1e-3, VOCAB, 0.9, 0.1),
        (100.0, VOCAB, 0.999, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, VOCAB, 1e-6, 0.0),
        (2.0, 30, 1.0, 0.05),
        (1.0, VOCAB, 1.0, 1.0),
    ],
)
def test_a_draw_falls_on_the_token_that_sorting_gives(
    temperature: float, top_k: int, top_p: float, min_p: float, listed: int
) -> None:
    logits = rows_of_all_kinds()
    numbers = [0.0, 0.999999] if listed == 128 else [0.31]
    for number in numbers:
        settings = [(temperature, float(top_k), top_p, min_p, number)] * len(logits)
        tokens = draw(logits, settings, listed)
        assert all(token in near for token, near in zip(tokens, tokens_near(logits, settings), strict=True))


def test_equal_logits_are_drawn_in_the_order_of_ids() -> None:
    logits = torch.zeros((5, VOCAB), device=DEVICE)
    at = [0.0, 0.5, 0.9999, 0.5, 0.5]
    settings = [(1.0, 7.0 if row == 3 else VOCAB, 0.1 if row == 4 else 1.0, 0.0, at[row]) for row in range(5)]
    assert draw(logits, settings) == [0, VOCAB // 2, VOCAB - 1, 3, 4]


def test_a_row_of_blocked_tokens_alone_or_of_nan_still_gives_a_token() -> None:
    logits = torch.full((2, VOCAB), -INF, device=DEVICE)
    logits[1] = float("nan")
    assert all(0 <= token < VOCAB for token in draw(logits, [(1.0, VOCAB, 0.9, 0.0, 0.5)] * 2))


def test_a_token_does_not_depend_on_the_other_rows() -> None:
    logits = rows_of_all_kinds()
    settings = [(0.9, 50.0, 0.95, 0.0, number) for number in (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7)]
    together = draw(logits, settings)
    assert together[2] == draw(logits[2:3], settings[2:3])[0]
