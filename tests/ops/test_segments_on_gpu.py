"""Attention inside segments that the device knows, at the sizes of serving, against plain torch on the same GPU."""

from __future__ import annotations

import pytest
import torch
import triton
from torch import Tensor

from prism_server.ops import Ops, make_ops
from prism_server.ops.interface import segment_tiles
from prism_server.ops.torch_ops import TorchOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
HEADS = 16


@pytest.fixture(scope="module")
def ops() -> Ops:
    return make_ops("triton", "cuda")


def inputs(num_rows: int, head_dim: int, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(num_rows)
    qkv = torch.randn((num_rows, 3 * HEADS, head_dim), generator=generator, device="cuda").to(dtype)
    rotated = qkv[:, : 2 * HEADS] * 2
    return rotated[:, :HEADS], rotated[:, HEADS:], qkv[:, 2 * HEADS :]


def tiles_of(lengths: list[int], room: int) -> Tensor:
    """With room for so many tiles."""
    tiles = segment_tiles(lengths)
    return torch.tensor(tiles + [(0, 0, 0)] * (room - len(tiles)), dtype=torch.int32, device="cuda")


def relative_error(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [72, 64, 16])
@pytest.mark.parametrize("lengths", [[784] * 3, [4096], [36, 1, 129, 128, 64, 1000, 4, 63], [4] * 100])
def test_segments_attend_to_themselves_alone_beside_padding(
    ops: Ops, lengths: list[int], head_dim: int, dtype: torch.dtype
) -> None:
    num_rows = sum(lengths)
    q, k, v = inputs(num_rows + 200, head_dim, dtype)
    for x in (q, k, v):
        x[num_rows:] = torch.nan
    tiles, scale = tiles_of(lengths, room=128), head_dim**-0.5
    got = ops.packed_attention(q, k, v, tiles, scale)[:num_rows]
    exact = [x[:num_rows].float() for x in (q, k, v)]
    expected = TorchOps().segment_attention(*exact, lengths, scale)
    assert relative_error(got, expected) < (1e-3 if dtype == torch.float32 else 1e-2)


def test_nothing_of_a_segment_reaches_another_whatever_is_in_it(ops: Ops) -> None:
    q, k, v = inputs(1000, 72)
    tiles = tiles_of([333, 300, 367], room=8)
    expected = ops.packed_attention(q, k, v, tiles, 0.1)
    for x in (q, k, v):
        x[333:633] = torch.nan
    got = ops.packed_attention(q, k, v, tiles, 0.1)
    for rows in (slice(0, 333), slice(633, 1000)):
        assert torch.equal(got[rows], expected[rows])


def test_rows_are_found_beyond_two_to_the_31_elements(ops: Ops) -> None:
    far, lengths = 640_000, [300, 200]
    qkv = torch.empty((far + 500, 3 * HEADS, 72), dtype=torch.bfloat16, device="cuda")
    qkv[far:] = torch.randn((500, 3 * HEADS, 72), device="cuda")
    assert qkv[far:].storage_offset() > 2**31
    q, k, v = qkv.split(HEADS, dim=1)
    tiles = tiles_of(lengths, room=5) + far
    got = ops.packed_attention(q, k, v, tiles, 0.1)[far:]
    expected = TorchOps().segment_attention(q[far:].float(), k[far:].float(), v[far:].float(), lengths, 0.1)
    assert relative_error(got, expected) < 1e-2


def test_a_captured_kernel_follows_its_segments(ops: Ops) -> None:
    q, k, v = inputs(512, 72)
    tiles = tiles_of([512], room=8)
    ops.packed_attention(q, k, v, tiles, 0.1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = ops.packed_attention(q, k, v, tiles, 0.1)
    for lengths in ([100, 412], [64] * 8, [500]):
        tiles.copy_(tiles_of(lengths, room=8))
        graph.replay()
        rows = slice(0, sum(lengths))
        expected = TorchOps().segment_attention(q[rows].float(), k[rows].float(), v[rows].float(), lengths, 0.1)
        assert relative_error(out[rows], expected) < 1e-2


def test_a_new_length_or_number_of_segments_compiles_nothing(ops: Ops, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(num_rows: int, room: int) -> None:
        ops.packed_attention(*inputs(num_rows, 72), tiles_of([num_rows], room), 0.1)

    run(256, 8)
    compiled: list[object] = []
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **about: compiled.append(about))
    for num_rows, room in ((1, 1), (17, 2), (333, 16), (1024, 128)):
        run(num_rows, room)
    assert compiled == []
