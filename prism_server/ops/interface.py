"""What the model asks of a device. A backend implements `Ops`; the model knows nothing else about it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from prism_server.ops.kv_storage import PagedKV


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """Where the rows of one step belong: S sequences, T rows, those of a sequence side by side, oldest first.

    Starts and lengths are host integers: who builds a step knows them, and nothing has to wait for the device.
    """

    query_starts: tuple[int, ...]
    """[S + 1]: rows of sequence s are [query_starts[s], query_starts[s + 1])."""
    context_lengths: tuple[int, ...]
    """[S]: rows of KV that sequence s has after this step's are stored."""
    block_tables: Tensor = field(repr=False)
    """int32 [S, max_pages] on the device: each sequence's pages in order; entries beyond its last are not read."""
    page_index: Tensor = field(repr=False)
    """int64 [T] on the device: the page in which each row is stored."""
    slot_index: Tensor = field(repr=False)
    """int64 [T] on the device: its place in that page."""

    def __post_init__(self) -> None:
        if len(self.query_starts) != len(self.context_lengths) + 1 or self.query_starts[0] != 0:
            raise ValueError(f"query_starts {self.query_starts} do not fit context_lengths {self.context_lengths}")
        for begin, end, context in zip(self.query_starts, self.query_starts[1:], self.context_lengths, strict=False):
            if not 1 <= end - begin <= context:
                raise ValueError(f"a sequence of context {context} cannot have rows [{begin}, {end})")
        if self.page_index.shape != (self.num_rows,) or self.slot_index.shape != (self.num_rows,):
            raise ValueError(f"{self.num_rows} rows, but pages {self.page_index.shape}, slots {self.slot_index.shape}")

    @property
    def num_sequences(self) -> int:
        return len(self.context_lengths)

    @property
    def num_rows(self) -> int:
        return self.query_starts[-1]


class Ops(ABC):
    """Operators of one backend. T rows; all tensors on its device; called by the thread that owns the device.

    Activations have the model's dtype (`x.dtype`); sums, norms, rotations and softmax are done in float32.
    """

    name: str

    @abstractmethod
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x [T, in], weight [out, in], bias [out] -> [T, out]."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x [..., n] divided by its root mean square, times weight [n]."""

    @abstractmethod
    def swiglu(self, gate_up: Tensor) -> Tensor:
        """[T, 2n], gate then up -> silu(gate) * up [T, n]."""

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
