"""Attention inside segments that the device knows, in Triton's interpreter, against plain torch."""

from __future__ import annotations

from triton_interpreter import DEVICE  # isort: skip  (decides how Triton is imported)

import pytest
import torch
from torch import Tensor

from prism_server.ops.interface import segment_tiles
from prism_server.ops.torch_ops import TorchOps
from prism_server.ops.triton import segments
from prism_server.ops.triton.segments import packed_attention

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NaN and infinity, in NumPy
HALF_STEP = 2**-8
"""Float16 stands for bfloat16, whose products the interpreter does not know."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that short segments have several tiles and blocks of keys."""
    for name, rows in (("BLOCK_ROWS", 32), ("BLOCK_KEYS", 16), ("WIDE_BLOCK", 16)):
        monkeypatch.setattr(segments, name, rows)


def inputs(num_rows: int, heads: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Q and K beside each other as rotation leaves them, V as its product leaves it; the softmax is peaked."""
    generator = torch.Generator().manual_seed(num_rows)
    qkv = torch.randn((num_rows, 3 * heads, head_dim), generator=generator).to(DEVICE, dtype)
    rotated = qkv[:, : 2 * heads] * 2
    return rotated[:, :heads], rotated[:, heads:], qkv[:, 2 * heads :]


def tiles_of(lengths: list[int], room: int = 0) -> Tensor:
    return torch.tensor([*segment_tiles(lengths), *[(0, 0, 0)] * room], dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("head_dim", [72, 64, 16, 8, 20])
def test_heads_of_any_size_attend_to_their_segment_as_in_plain_torch(head_dim: int, dtype: torch.dtype) -> None:
    q, k, v = inputs(60, 2, head_dim, dtype)
    tiles = tiles_of([37, 1, 16, 6])
    got = packed_attention(q, k, v, tiles, head_dim**-0.5)
    expected = TorchOps().packed_attention(q.float(), k.float(), v.float(), tiles, head_dim**-0.5)
    bound = 1e-5 if dtype == torch.float32 else HALF_STEP
    torch.testing.assert_close(got.float(), expected, rtol=bound, atol=2 * bound)


def test_room_for_segments_that_are_not_there_and_rows_of_padding_change_nothing() -> None:
    q, k, v = inputs(70, 2, 24, torch.float32)
    lengths = [20, 0, 33]
    exact = packed_attention(q[:53], k[:53], v[:53], tiles_of([20, 33]), 0.2)
    for x in (q, k, v):
        x[53:] = torch.nan
    padded = packed_attention(q, k, v, tiles_of(lengths, room=9), 0.2)
    assert torch.equal(padded[:53], exact)


def test_nothing_of_a_segment_reaches_another_whatever_is_in_it() -> None:
    q, k, v = inputs(60, 1, 16, torch.float32)
    tiles = tiles_of([19, 22, 19])
    expected = packed_attention(q, k, v, tiles, 0.25)
    for x in (q, k, v):
        x[19:41] = torch.nan
    got = packed_attention(q, k, v, tiles, 0.25)
    for rows in (slice(0, 19), slice(41, 60)):
        assert torch.equal(got[rows], expected[rows])
    assert got[19:41].isnan().all()


def test_a_segment_of_several_tiles_is_worked_on_tile_by_tile() -> None:
    q, k, v = inputs(320, 1, 16, torch.float32)
    tiles = tiles_of([10, 300, 10])
    assert tiles.tolist()[1:4] == [[10, 10, 310], [138, 10, 310], [266, 10, 310]]
    expected = TorchOps().packed_attention(q, k, v, tiles, 0.25)
    torch.testing.assert_close(packed_attention(q, k, v, tiles, 0.25), expected)
