"""The one place that knows what a KV page is made of: its shapes, strides and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

KVDtype = Literal["fp8", "bf16", "fp32"]

ELEMENT_BYTES: dict[KVDtype, int] = {"fp8": 1, "bf16": 2, "fp32": 4}
SCALE_BYTES = 4
"""FP8 rows carry one FP32 scale per token and head, for K and for V."""


@dataclass(frozen=True, slots=True)
class PageLayout:
    """`[layer, 2, page, kv_head, slot, head_dim]` payload; FP8 adds FP32 scales `[layer, 2, page, kv_head, slot]`."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int = 64
    kv_dtype: KVDtype = "fp8"

    def __post_init__(self) -> None:
        if min(self.num_layers, self.num_kv_heads, self.head_dim, self.page_tokens) < 1:
            raise ValueError(f"every size of a page layout must be at least 1: {self}")
        if self.kv_dtype not in ELEMENT_BYTES:
            raise ValueError(f"unknown KV type {self.kv_dtype!r}; known: {', '.join(ELEMENT_BYTES)}")

    @property
    def has_scales(self) -> bool:
        return self.kv_dtype == "fp8"

    @property
    def payload_bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * self.head_dim * ELEMENT_BYTES[self.kv_dtype]

    @property
    def scale_bytes_per_token(self) -> int:
        return self.num_layers * 2 * self.num_kv_heads * SCALE_BYTES if self.has_scales else 0

    @property
    def bytes_per_token(self) -> int:
        return self.payload_bytes_per_token + self.scale_bytes_per_token

    @property
    def page_bytes(self) -> int:
        return self.bytes_per_token * self.page_tokens

    def payload_shape(self, num_pages: int) -> tuple[int, int, int, int, int, int]:
        return (self.num_layers, 2, num_pages, self.num_kv_heads, self.page_tokens, self.head_dim)

    def scale_shape(self, num_pages: int) -> tuple[int, int, int, int, int]:
        return (self.num_layers, 2, num_pages, self.num_kv_heads, self.page_tokens)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` rows."""
        return -(-num_tokens // self.page_tokens)

    def pages_in(self, num_bytes: int) -> int:
        """Whole pages that fit into `num_bytes`."""
        return max(0, num_bytes) // self.page_bytes
