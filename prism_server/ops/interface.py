"""What the model asks of a device. A backend implements `Ops`; the model knows nothing else about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from prism_server.ops.fp8_head import Fp8Head
from prism_server.ops.kv_storage import PagedKV

SEGMENT_TILE_ROWS = 128
"""Of one tile of `Ops.packed_attention`."""


def segment_tiles(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """The tiles of segments side by side: each one's first row, and the rows where its segment begins and ends."""
    ends = list(accumulate(lengths))
    return [
        (first, end - length, end)
        for length, end in zip(lengths, ends, strict=True)
        for first in range(end - length, end, SEGMENT_TILE_ROWS)
    ]


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """Where the rows of one step belong: S sequences, T rows, those of a sequence side by side, oldest first.

    Kernels read device tensors only, so that a captured graph serves every step of its size. A batch for a graph is
    padded: sequences without rows (equal starts, context 0) at the end, rows whose page is -1 (nothing is stored, what
    comes out of them means nothing). An eager batch is exact and also has the same numbers as host integers.
    """

    query_starts: Tensor = field(repr=False)
    """int32 [S + 1]: rows of sequence s are [query_starts[s], query_starts[s + 1])."""
    context_lengths: Tensor = field(repr=False)
    """int32 [S]: rows of KV that sequence s has after this step's are stored."""
    block_tables: Tensor = field(repr=False)
    """int32 [N, max_pages]: pages in order, of N >= S holders; entries beyond a sequence's last are not read."""
    table_rows: Tensor = field(repr=False)
    """int32 [S]: which row of `block_tables` is sequence s's."""
    page_index: Tensor = field(repr=False)
    """int64 [T]: the page in which each row is stored."""
    slot_index: Tensor = field(repr=False)
    """int64 [T]: its place in that page."""
    max_query_rows: int
    """No sequence has more rows than this in the step (a host bound: grids are made from it)."""
    host_query_starts: tuple[int, ...] | None = None
    host_context_lengths: tuple[int, ...] | None = None

    @classmethod
    def exact(
        cls,
        query_starts: tuple[int, ...],
        context_lengths: tuple[int, ...],
        block_tables: Tensor,
        table_rows: Tensor,
        page_index: Tensor,
        slot_index: Tensor,
    ) -> AttentionBatch:
        """An eager step's batch, checked; starts and lengths go to the device of `block_tables`."""
        if len(query_starts) != len(context_lengths) + 1 or query_starts[0] != 0:
            raise ValueError(f"query_starts {query_starts} do not fit context_lengths {context_lengths}")
        counts = [end - begin for begin, end in pairwise(query_starts)]
        for begin, count, context in zip(query_starts, counts, context_lengths, strict=False):
            if not 1 <= count <= context:
                raise ValueError(f"a sequence of context {context} cannot have rows [{begin}, {begin + count})")
        num_rows = query_starts[-1]
        if page_index.shape != (num_rows,) or slot_index.shape != (num_rows,):
            raise ValueError(f"{num_rows} rows, but pages {page_index.shape}, slots {slot_index.shape}")
        device = block_tables.device
        return cls(
            torch.tensor(query_starts, dtype=torch.int32, device=device),
            torch.tensor(context_lengths, dtype=torch.int32, device=device),
            block_tables,
            table_rows,
            page_index,
            slot_index,
            max(counts),
            query_starts,
            context_lengths,
        )

    @property
    def host_query_rows(self) -> list[int]:
        """How many rows each sequence of an exact batch has."""
        assert self.host_query_starts is not None, "only an exact batch is known to the host"
        return [end - begin for begin, end in pairwise(self.host_query_starts)]

    @property
    def num_sequences(self) -> int:
        return self.context_lengths.shape[0]

    @property
    def num_rows(self) -> int:
        return self.page_index.shape[0]


class Ops(ABC):
    """Operators of one backend. T rows; all tensors on its device; called by the thread that owns the device.

    Activations have the model's dtype (`x.dtype`); sums, norms, rotations and softmax are done in float32.
    """

    name: str
    supports_graphs: bool = False
    """Whether a step of padded batches can be captured in a CUDA graph: nothing in it looks at host integers."""

    def reserve(self, max_rows: int, max_sequences: int, max_context_tokens: int) -> None:  # noqa: B027
        """Called once, before the first step: make what is needed for the largest step without a later allocation."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in], weight [out, in], bias [out] -> [T, out]."""

    @abstractmethod
    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
        """Rows of x [T, in] over their root mean square, times norm [in], then weight [out, in] -> [T, out]."""

    @abstractmethod
    def norm_swiglu(self, x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
        """The same norm; gate_up [2n, in], gate's rows before up's; -> silu(gate) * up [T, n]."""

    @abstractmethod
    def linear_add(self, x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        """residual [T, out] plus x [T, in] times weight [out, in]; `residual` may be where it is written."""

    @abstractmethod
    def norm_logits(self, x: Tensor, norm: Tensor, eps: float, head: Tensor) -> Tensor:
        """The same norm, then the head [vocab, in]: float32 [R, vocab] of x [R, in]."""

    @abstractmethod
    def argmax(self, logits: Tensor) -> Tensor:
        """int64 [R] of float32 [R, vocab]; of equals the lowest id."""

    @abstractmethod
    def norm_best(self, x: Tensor, norm: Tensor, eps: float, head: Fp8Head) -> Tensor:
        """int64 [R]: `argmax` of `norm_logits`, for x [R, in] and the head's weight, without all of the logits.

        The head's FP8 copy names candidates, their logits are worked out from the head itself; of equals the lowest id.
        A token that is none of the candidates is not found, however good: see fp8_head.py for how unlikely that is.
        """

    @abstractmethod
    def draw(self, logits: Tensor, params: Tensor) -> Tensor:
        """Tokens int64 [R], at random: logits float32 [R, vocab]; params float64 [R, 5], a row a draw.

        A row: temperature (> 0), top_k (the vocabulary's size when off), top_p, min_p, and the uniform number in
        [0, 1) that decides. Order: temperature, then top-k, then top-p and min-p of what is left; the best token always
        stays. Tokens in falling order of logits (of equals the lower id first) fill [0, 1); the number falls on one.
        """

    @abstractmethod
    def copy_rows(self, kv: PagedKV, sources: Sequence[int], targets: Sequence[int], rows: Sequence[int]) -> None:
        """Rows [0, rows[i]) of page sources[i] to page targets[i]: all layers, payload and scales, byte for byte."""

    @abstractmethod
    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Half-split rotation of x [T, heads, head_dim] by cos, sin float32 [T, head_dim / 2]."""

    @abstractmethod
    def qk_norm_rope_store(
        self,
        qkv: Tensor,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        kv: PagedKV,
        layer: int,
        batch: AttentionBatch,
    ) -> Tensor:
        """Normalise each head of Q and K, rotate them, store K and V in their pages; gives Q [T, heads, head_dim].

        qkv [T, (heads + 2 * kv_heads) * head_dim]: Q, K, V side by side; norms [head_dim]; cos, sin float32
        [T, head_dim / 2] of the half-split rotation. Writes `kv` at the batch's pages and slots.
        """

    @abstractmethod
    def paged_attention(self, q: Tensor, kv: PagedKV, layer: int, batch: AttentionBatch, scale: float) -> Tensor:
        """Causal attention of this step's rows over the stored K and V, their own included.

        q [T, heads, head_dim] -> [T, heads * head_dim]. Query head h reads KV head h // (heads / kv_heads).
        """

    @abstractmethod
    def segment_attention(self, q: Tensor, k: Tensor, v: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
        """Full attention inside each of the segments that q, k, v [N, heads, head_dim] consist of; -> that shape."""

    @abstractmethod
    def packed_attention(self, q: Tensor, k: Tensor, v: Tensor, tiles: Tensor, scale: float) -> Tensor:
        """`segment_attention` by device tensors alone, so that a graph serves every batch of its size.

        tiles int32 [T, 3], those of `segment_tiles` and then any number of zeros. Rows of no segment are padding: they
        are not read, and what comes out of them means nothing. The last two axes of q, k and v are contiguous.
        """
