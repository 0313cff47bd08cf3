"""The language model: a decoder over paged KV that takes picture features in its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from prism_server.model.config import TextConfig
from prism_server.model.loader import Tensors
from prism_server.model.mrope import MRope
from prism_server.ops.fp8_head import Fp8Head
from prism_server.ops.interface import AttentionBatch, Ops
from prism_server.ops.kv_storage import PagedKV


@dataclass(frozen=True, eq=False, slots=True)
class FeatureRows:
    """Features for M of a step's rows, gathered from all its media, level by level in the same order."""

    rows: Tensor = field(repr=False)
    """int64 [M], places in the step's rows; none twice."""
    main: Tensor = field(repr=False)
    """[M, hidden], replaces the embedding."""
    deepstack: tuple[Tensor, ...] = field(repr=False)
    """[M, hidden] each; level k is added after decoder layer k."""

    def show(self, hidden: Tensor) -> Tensor:
        """Embeddings [T, hidden] with the media's rows in place."""
        return hidden.index_copy_(0, self.rows, self.main.to(hidden.dtype))

    def deepen(self, hidden: Tensor, layer: int) -> None:
        """Add a layer's level, if there is one, to its output."""
        if layer < len(self.deepstack):
            hidden.index_add_(0, self.rows, self.deepstack[layer].to(hidden.dtype))


@dataclass(frozen=True, eq=False, slots=True)
class MediaCanvas:
    """The same for every row of a step, whether it shows media or not: at fixed addresses, as a graph reads it."""

    shown: Tensor = field(repr=False)
    """bool [T, 1]"""
    levels: Tensor = field(repr=False)
    """[1 + DeepStack levels, T, hidden]: main, then what is added; zero in rows that show no media."""

    @classmethod
    def empty(
        cls, num_rows: int, num_levels: int, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> MediaCanvas:
        shown = torch.zeros((num_rows, 1), dtype=torch.bool, device=device)
        return cls(shown, torch.zeros((num_levels, num_rows, hidden_size), dtype=dtype, device=device))

    def window(self, num_rows: int) -> MediaCanvas:
        """Its first rows."""
        return MediaCanvas(self.shown[:num_rows], self.levels[:, :num_rows])

    def draw(self, media: FeatureRows) -> None:
        """Show these rows and no others."""
        self.shown.zero_()
        self.levels.zero_()
        self.shown.index_fill_(0, media.rows, True)
        for level, features in zip(self.levels, (media.main, *media.deepstack), strict=True):
            level.index_copy_(0, media.rows, features.to(level.dtype))

    def show(self, hidden: Tensor) -> Tensor:
        return torch.where(self.shown, self.levels[0], hidden)

    def deepen(self, hidden: Tensor, layer: int) -> None:
        if layer + 1 < self.levels.shape[0]:
            hidden.add_(self.levels[layer + 1])


@dataclass(frozen=True, eq=False, slots=True)
class DecoderLayer:
    """One layer's weights; Q, K, V and gate, up are fused along their outputs, for one product each."""

    input_norm: Tensor
    qkv: Tensor
    q_norm: Tensor
    k_norm: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class TextModel:
    """Weights of the language side and the forward pass over them; keeps no state between calls."""

    def __init__(
        self, config: TextConfig, tensors: Tensors, ops: Ops, device: torch.device, fp8_head: bool = False
    ) -> None:
        """`fp8_head`: also keep an FP8 copy of the head, for `best_tokens`."""
        self.config = config
        self._ops = ops
        self._rope = MRope(config, device)
        prefix = "model.language_model."
        self._embedding = tensors.pop(prefix + "embed_tokens.weight")
        self._layers = [_take_layer(tensors, f"{prefix}layers.{i}.") for i in range(config.num_layers)]
        self._norm = tensors.pop(prefix + "norm.weight")
        self._head = self._embedding if config.tied_head else tensors.pop("lm_head.weight")
        self._fp8_head = Fp8Head.of(self._head) if fp8_head else None

    @property
    def dtype(self) -> torch.dtype:
        return self._embedding.dtype

    @property
    def has_fp8_head(self) -> bool:
        return self._fp8_head is not None

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        kv: PagedKV,
        batch: AttentionBatch,
        media: FeatureRows | MediaCanvas | None = None,
    ) -> Tensor:
        """One step: token_ids int64 [T], positions int64 [3, T] -> hidden states [T, hidden] before the last norm.

        Stores every row's K and V where `batch` says. Ids at media rows only have to be inside the vocabulary.
        """
        ops, eps = self._ops, self.config.rms_norm_eps
        cos, sin = self._rope(positions)
        hidden = self._embedding[token_ids]
        if media is not None:
            hidden = media.show(hidden)
        for index, layer in enumerate(self._layers):
            qkv = ops.norm_linear(hidden, layer.input_norm, eps, layer.qkv)
            q = ops.qk_norm_rope_store(qkv, layer.q_norm, layer.k_norm, eps, cos, sin, kv, index, batch)
            attended = ops.paged_attention(q, kv, index, batch, self.config.head_dim**-0.5)
            hidden = ops.linear_add(attended, layer.out, hidden)
            inner = ops.norm_swiglu(hidden, layer.mlp_norm, eps, layer.gate_up)
            hidden = ops.linear_add(inner, layer.down, hidden)
            if media is not None:
                media.deepen(hidden, index)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """Rows that `forward` gave, [R, hidden] -> float32 [R, vocab]."""
        return self._ops.norm_logits(hidden, self._norm, self.config.rms_norm_eps, self._head)

    @torch.inference_mode()
    def best_tokens(self, hidden: Tensor) -> Tensor:
        """Rows that `forward` gave, [R, hidden] -> int64 [R]: their likeliest tokens, by the FP8 head."""
        assert self._fp8_head is not None, "the head has no copy in FP8"
        return self._ops.norm_best(hidden, self._norm, self.config.rms_norm_eps, self._fp8_head)


def _take_layer(tensors: Tensors, prefix: str) -> DecoderLayer:
    """Move a layer's tensors out of `tensors`, so that the unfused ones are freed layer by layer."""

    def take(*names: str) -> Tensor:
        parts = [tensors.pop(f"{prefix}{name}.weight") for name in names]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    return DecoderLayer(
        input_norm=take("input_layernorm"),
        qkv=take("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        q_norm=take("self_attn.q_norm"),
        k_norm=take("self_attn.k_norm"),
        out=take("self_attn.o_proj"),
        mlp_norm=take("post_attention_layernorm"),
        gate_up=take("mlp.gate_proj", "mlp.up_proj"),
        down=take("mlp.down_proj"),
    )
