"""Full attention inside segments: the vision tower's, one picture or one pair of frames each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F


def segment_attention(q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """`Ops.segment_attention` by torch's own kernels: segments of one length are one batch."""
    if len(set(lengths)) == 1:
        return _attend(q, k, v, lengths[0], scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for length, rows in _rows_by_length(tuple(lengths), q.device):
        out[rows] = _attend(q[rows], k[rows], v[rows], length, scale)
    return out


def _attend(q: Tensor, k: Tensor, v: Tensor, length: int, scale: float) -> Tensor:
    """[n * length, heads, head_dim], n segments, -> that shape."""
    queries, keys, values = (x.view(-1, length, *x.shape[1:]).transpose(1, 2) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(queries, keys, values, scale=scale)
    return attended.transpose(1, 2).flatten(0, 1)


@lru_cache(maxsize=8)  # all blocks of the tower ask for the same
def _rows_by_length(lengths: tuple[int, ...], device: torch.device) -> list[tuple[int, Tensor]]:
    """Each length there is, and int64 rows of its segments, one after the other."""
    starts = defaultdict(list)
    for length, end in zip(lengths, accumulate(lengths), strict=True):
        starts[length].append(end - length)
    rows = {
        length: [row for start in found for row in range(start, start + length)] for length, found in starts.items()
    }
    if device.type != "cuda":
        return [(length, torch.tensor(of_length)) for length, of_length in rows.items()]
    # From pinned memory: a plain copy would wait until the device has done all its work.
    return [
        (length, torch.tensor(of_length, pin_memory=True).to(device, non_blocking=True))
        for length, of_length in rows.items()
    ]
