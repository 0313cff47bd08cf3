"""The vision tower: pixels to the features that the language model reads, in as many stops as the scheduler wants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn import functional as F

from prism_server.model.config import VisionConfig
from prism_server.model.loader import Tensors
from prism_server.model.vision_grid import patch_positions, resample_table
from prism_server.ops.interface import Ops

LAYER_NORM_EPS = 1e-6


@dataclass(frozen=True, eq=False, slots=True)
class Features:
    """One item's encoder output: `main` [num_tokens, hidden] and as many again for each DeepStack level."""

    main: Tensor = field(repr=False)
    deepstack: tuple[Tensor, ...] = field(repr=False)

    @property
    def num_tokens(self) -> int:
        return self.main.shape[0]

    @property
    def num_bytes(self) -> int:
        return sum(level.nbytes for level in (self.main, *self.deepstack))


@dataclass(eq=False, slots=True)
class VisionState:
    """One item on its way through the tower. `VisionTower` alone changes it."""

    grid: tuple[int, int, int]
    num_blocks: int
    hidden: Tensor = field(repr=False)
    cos: Tensor = field(repr=False)
    sin: Tensor = field(repr=False)
    deepstack: list[Tensor] = field(default_factory=list, repr=False)
    next_block: int = 0

    @property
    def done(self) -> bool:
        return self.next_block == self.num_blocks

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.hidden, self.cos, self.sin, *self.deepstack))


@dataclass(frozen=True, eq=False, slots=True)
class Affine:
    """A linear map or a layer norm: weight and bias."""

    weight: Tensor
    bias: Tensor

    @classmethod
    def take(cls, tensors: Tensors, name: str) -> Affine:
        return cls(tensors.pop(f"{name}.weight"), tensors.pop(f"{name}.bias"))

    def norm(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.bias.shape, self.weight, self.bias, LAYER_NORM_EPS)


@dataclass(frozen=True, eq=False, slots=True)
class Block:
    """Weights of one transformer block."""

    norm1: Affine
    qkv: Affine
    proj: Affine
    norm2: Affine
    fc1: Affine
    fc2: Affine


@dataclass(frozen=True, eq=False, slots=True)
class Merger:
    """Two-layer map of merge x merge patches to one token. The main one norms each patch, DeepStack's their group."""

    norm: Affine
    fc1: Affine
    fc2: Affine

    @classmethod
    def take(cls, tensors: Tensors, prefix: str) -> Merger:
        return cls(*(Affine.take(tensors, prefix + name) for name in ("norm", "linear_fc1", "linear_fc2")))

    def __call__(self, patches: Tensor, ops: Ops) -> Tensor:
        """[n, hidden] in merge-block order -> [n / merge^2, out_hidden]."""
        width = self.norm.bias.shape[0]
        group = self.fc1.weight.shape[1]
        normed = self.norm.norm(patches.reshape(-1, width)).view(-1, group)
        return ops.linear(F.gelu(ops.linear(normed, self.fc1.weight, self.fc1.bias)), self.fc2.weight, self.fc2.bias)


def pixel_table_of(mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """What each byte of each channel becomes: float32 [256, channels], (value / 255 - mean) / std."""
    values = torch.arange(256, dtype=torch.float64).unsqueeze(1) / 255
    return ((values - torch.tensor(mean, dtype=torch.float64)) / torch.tensor(std, dtype=torch.float64)).float()


class VisionTower:
    """Weights of the vision side and the passes over them (Hugging Face transformers, `Qwen3VLVisionModel`)."""

    def __init__(
        self,
        config: VisionConfig,
        tensors: Tensors,
        ops: Ops,
        device: torch.device,
        pixel_table: Tensor | None = None,
    ) -> None:
        """`pixel_table` float32 [256, channels] says what a byte means; without it, mean and deviation are 0.5."""
        self.config = config
        self._ops = ops
        if pixel_table is None:
            pixel_table = pixel_table_of([0.5] * config.in_channels, [0.5] * config.in_channels)
        self._pixel_table = pixel_table.t().contiguous().to(device)  # [channels, 256]
        prefix = "model.visual."
        patch = Affine.take(tensors, prefix + "patch_embed.proj")
        # A convolution whose stride is its kernel is a product, and as one it is many times faster.
        self._patch = Affine(patch.weight.flatten(1), patch.bias)
        self._positions = tensors.pop(prefix + "pos_embed.weight")
        self._blocks = [_take_block(tensors, f"{prefix}blocks.{i}.") for i in range(config.depth)]
        self._merger = Merger.take(tensors, prefix + "merger.")
        self._deepstack_mergers = {
            block: Merger.take(tensors, f"{prefix}deepstack_merger_list.{level}.")
            for level, block in enumerate(config.deepstack_blocks)
        }

    @property
    def dtype(self) -> torch.dtype:
        return self._positions.dtype

    def feature_bytes(self, num_tokens: int) -> int:
        """Bytes of the features of an item of `num_tokens`: main and every DeepStack level."""
        levels = 1 + len(self.config.deepstack_blocks)
        return num_tokens * levels * self.config.out_hidden_size * self.dtype.itemsize

    @torch.inference_mode()
    def begin(self, pixels: Tensor, grid: tuple[int, int, int]) -> VisionState:
        """Embed one item's patches: uint8 [n, channels, frames, patch, patch] in merge-block order, on any device.

        Of `frames` there are as many as a patch is deep, or one, which is then shown that often (pictures).
        """
        config = self.config
        t, h, w = grid
        if pixels.shape[0] != t * h * w or h % config.merge_size or w % config.merge_size:
            raise ValueError(f"{pixels.shape[0]} patches do not fill a grid of {grid} by {config.merge_size}")
        device = self._positions.device
        values = torch.stack(
            [self._pixel_table[c][pixels[:, c].to(device).int()] for c in range(config.in_channels)], dim=1
        )
        values = values.expand(-1, -1, config.temporal_patch_size, -1, -1).flatten(1).to(self.dtype)
        hidden = self._ops.linear(values, self._patch.weight, self._patch.bias)
        hidden += resample_table(self._positions, h, w, config.merge_size).repeat(t, 1)
        places = patch_positions(h, w, config.merge_size, device).repeat(t, 1)
        cos, sin = self._angles(places)
        return VisionState(grid, len(self._blocks), hidden, cos, sin)

    def _angles(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Axial rotation: row number turns the first half of the frequencies, column number the second."""
        quarter = self.config.head_dim // 4
        exponents = torch.arange(quarter, dtype=torch.float32, device=places.device) / quarter
        frequencies = 1.0 / (self.config.rope_theta**exponents)
        angles = (places.float().unsqueeze(2) * frequencies).flatten(1)  # [n, head_dim / 2]
        return angles.cos(), angles.sin()

    @torch.inference_mode()
    def advance(self, states: VisionState | Sequence[VisionState], num_blocks: int) -> None:
        """Run up to `num_blocks` more blocks; several items at the same block go through them as one batch."""
        items = [states] if isinstance(states, VisionState) else list(states)
        if len({state.next_block for state in items}) != 1:
            raise ValueError(f"items at blocks {[state.next_block for state in items]} cannot advance together")
        first = items[0].next_block
        last = min(first + num_blocks, len(self._blocks))
        hidden = torch.cat([state.hidden for state in items])
        cos = torch.cat([state.cos for state in items])
        sin = torch.cat([state.sin for state in items])
        segments = [h * w for t, h, w in (state.grid for state in items) for _ in range(t)]
        num_patches = [state.hidden.shape[0] for state in items]
        for index in range(first, last):
            hidden = self._run_block(self._blocks[index], hidden, cos, sin, segments)
            if index in self._deepstack_mergers:
                level = self._deepstack_mergers[index](hidden, self._ops)
                num_tokens = [patches // self.config.merge_size**2 for patches in num_patches]
                for state, part in zip(items, _parts(level, num_tokens), strict=True):
                    state.deepstack.append(part)
        for state, part in zip(items, _parts(hidden, num_patches), strict=True):
            state.hidden = part
            state.next_block = last

    @torch.inference_mode()
    def finish(self, state: VisionState) -> Features:
        """The features of an item that has passed every block."""
        if not state.done:
            raise ValueError(f"finish after {state.next_block} of {state.num_blocks} blocks")
        return Features(self._merger(state.hidden, self._ops), tuple(state.deepstack))

    def _run_block(self, block: Block, hidden: Tensor, cos: Tensor, sin: Tensor, segments: list[int]) -> Tensor:
        ops, heads = self._ops, self.config.num_heads
        qkv = ops.linear(block.norm1.norm(hidden), block.qkv.weight, block.qkv.bias)
        q, k, v = qkv.view(hidden.shape[0], 3, heads, -1).unbind(1)
        q, k = ops.rotate(q, cos, sin), ops.rotate(k, cos, sin)
        attended = ops.segment_attention(q, k, v, segments, self.config.head_dim**-0.5).flatten(1)
        hidden = hidden + ops.linear(attended, block.proj.weight, block.proj.bias)
        inner = F.gelu(ops.linear(block.norm2.norm(hidden), block.fc1.weight, block.fc1.bias), approximate="tanh")
        return hidden + ops.linear(inner, block.fc2.weight, block.fc2.bias)


def _parts(whole: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Rows cut by `sizes`, each with memory of its own: a part that is kept must not keep its neighbours."""
    if len(sizes) == 1:
        return [whole]
    return [part.clone() for part in torch.tensor_split(whole, list(accumulate(sizes))[:-1])]


def _take_block(tensors: Tensors, prefix: str) -> Block:
    return Block(
        norm1=Affine.take(tensors, prefix + "norm1"),
        qkv=Affine.take(tensors, prefix + "attn.qkv"),
        proj=Affine.take(tensors, prefix + "attn.proj"),
        norm2=Affine.take(tensors, prefix + "norm2"),
        fc1=Affine.take(tensors, prefix + "mlp.linear_fc1"),
        fc2=Affine.take(tensors, prefix + "mlp.linear_fc2"),
    )
