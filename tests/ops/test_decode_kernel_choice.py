"""Which kernel decodes: that of CUDA C++ where it has room for every step, else Triton's, in its interpreter here."""

from __future__ import annotations

from triton_interpreter import DEVICE  # isort: skip  (decides how Triton is imported)

import pytest
import torch
from attention_cases import LAYER, Heads, make_case
from torch._subclasses.fake_tensor import FakeTensorMode

from prism_server.capacity.page_layout import PageLayout
from prism_server.ops.kv_storage import PagedKV
from prism_server.ops.triton.attention import PagedAttention, Tiles
from prism_server.ops.triton.attention_launch import Tile

pytest.importorskip("cuda.bindings")

HEADS = Heads(query=32, kv=8, head_dim=128)
TINY = Tile(16, 16, 32, 4, 16, num_warps=1, num_stages=2, programs_per_sm=1, max_registers=255)
TINY_HEADS = Heads(query=2, kv=1, head_dim=32)


@pytest.mark.parametrize(
    ("max_rows", "max_sequences", "is_own"),
    [
        pytest.param(8192, 64, True, id="the defaults"),
        pytest.param(65_536, 256, True, id="as much as the kernel has room for"),
        pytest.param(8192, 257, False, id="a sequence more"),
        pytest.param(8192, 4096, False, id="as many sequences as a PrismDeployment may ask for"),
        pytest.param(65_537, 256, False, id="a row more than its 16 bits tell apart"),
    ],
)
def test_the_decode_kernel_is_chosen_where_it_has_room_for_every_step(
    max_rows: int, max_sequences: int, is_own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from prism_server.ops.cuda import decode_attention

    monkeypatch.setattr(decode_attention, "is_hopper", lambda device: True)
    compiled = object()
    monkeypatch.setattr(decode_attention, "DecodeAttention", lambda *arguments: compiled)
    attend = PagedAttention({"bf16": Tiles(TINY, TINY, TINY)})
    attend.reserve(max_rows, max_sequences, HEADS.query, HEADS.kv, HEADS.head_dim, "cpu")
    kv = PagedKV(PageLayout(1, HEADS.kv, HEADS.head_dim, 64, "fp8"), 1, "cpu")
    with FakeTensorMode():
        q = torch.empty((1, HEADS.query, HEADS.head_dim), dtype=torch.bfloat16, device="cuda")
    assert attend._workspace is not None
    assert (attend._decode_for(q, kv, attend._workspace) is compiled) is is_own


def test_more_sequences_than_the_decode_kernel_takes_decode_beside_each_other() -> None:
    lens = [(1, 1 + number % 5) for number in range(300)]
    case = make_case(lens, TINY_HEADS, "fp8", 64, seed=0, device=DEVICE)
    attend = PagedAttention({"fp8": Tiles(TINY, TINY, TINY)})
    attend.reserve(len(lens), len(lens), TINY_HEADS.query, TINY_HEADS.kv, TINY_HEADS.head_dim, DEVICE)
    case.check(attend(case.q, case.kv, LAYER, case.batch, case.scale))
