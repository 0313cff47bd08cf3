"""The same operators and model on a CUDA device: same bytes, same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from reference import DEMO_CHECKPOINT, Session, demo_model, make_prompt, tiny_model

from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.model import Qwen3VL
from prism_server.ops import HostPages, PagedKV, make_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
KV_DTYPES: tuple[KVDtype, ...] = ("fp8", "bf16", "fp32")


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_are_stored_copied_and_swapped_to_the_same_bytes_as_on_the_cpu(kv_dtype: KVDtype) -> None:
    layout = PageLayout(2, 3, 128, 8, kv_dtype)
    rows = torch.randn((20, 3, 128), generator=torch.Generator().manual_seed(0))
    rows *= torch.logspace(-3, 3, 20).view(20, 1, 1)
    pages, slots = torch.tensor([4, 1, 2]).repeat_interleave(8)[:20], torch.arange(20) % 8
    contents = []
    for device in ("cpu", "cuda"):
        kv = PagedKV(layout, 6, device)
        for tensor in kv.tensors():
            tensor.zero_()
        for layer in range(2):
            kv.store(layer, rows.to(device), -rows.to(device), pages.to(device), slots.to(device))
        kv.copy_rows([4, 2], [0, 3], [5, 4])
        host = HostPages(layout, 2, pinned=device == "cuda")
        host.swap_out(kv, [4, 1], [1, 0])
        host.swap_in(kv, [1], [5])
        contents.append(
            [*(t.cpu() for t in kv.tensors()), *host.tensors(), *(t.cpu() for t in kv.read(1, [4, 1, 2], 20))]
        )
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(*contents, strict=True))


def test_addresses_are_64_bit_on_the_device() -> None:
    layout = PageLayout(1, 1, 128, 64, "fp8")
    num_pages = 2**31 // (64 * 128) + 8
    kv = PagedKV(layout, num_pages, "cuda")
    kv.payload.view(torch.uint8).zero_()
    rows = torch.randn((64, 1, 128), device="cuda")
    far, near = num_pages - 1, 7  # 2^31 elements apart
    kv.store(0, rows, rows, torch.full((64,), far, device="cuda"), torch.arange(64, device="cuda"))
    kv.copy_rows([far], [far - 1], [64])
    small = PagedKV(layout, 1, "cuda")
    small.store(0, rows, rows, torch.zeros(64, dtype=torch.int64, device="cuda"), torch.arange(64, device="cuda"))
    for page in (far, far - 1):
        assert all(torch.equal(a, b) for a, b in zip(kv.read(0, [page], 64), small.read(0, [0], 64), strict=True))
    assert not kv.payload.view(torch.uint8)[:, :, near].any()


@pytest.mark.parametrize("kind", ["2b", "8b", "demo"])
def test_logits_are_the_references_on_the_device(tmp_path: Path, kind: str) -> None:
    reference = demo_model() if kind == "demo" else tiny_model(kind)
    directory = DEMO_CHECKPOINT if kind == "demo" else tmp_path
    if kind != "demo":
        reference.save_pretrained(tmp_path)
    model = Qwen3VL.load(directory, "cuda", torch.float32, make_ops("auto", "cuda"))
    prompts = [make_prompt(reference, [(1, 6, 8), (1, 4, 4)], seed=1), make_prompt(reference, [(1, 4, 6)], seed=2)]
    session = Session(model, prompts, 16, "fp32")
    lengths = [len(prompt.ids) for prompt in prompts]
    first = session.step({0: 14, 1: lengths[1]})
    rest = session.step({0: lengths[0]})
    for got, prompt in ((torch.cat((first[:14], rest)), prompts[0]), (first[14:], prompts[1])):
        # Tenfold the bound on a CPU: the reference is on a CPU, so every product sums in another order.
        torch.testing.assert_close(got, prompt.reference_logits(reference), rtol=0, atol=1e-3)
