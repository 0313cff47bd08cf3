"""The vision tower: pixels to the features that the language model reads, in as many stops as the scheduler wants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from prism_server.model.config import VisionConfig
from prism_server.model.loader import Tensors
from prism_server.model.vision_canvas import CanvasWindow, PaddedBlocks, VisionCanvas
from prism_server.model.vision_grid import Frame, FrameTable
from prism_server.ops.interface import Ops

LAYER_NORM_EPS = 1e-6
EMBEDDED_PATCHES = 8192
"""Patches that are embedded at once: their look-up takes eight times the bytes of their pixels."""
BLOCK_PATCHES = 16_384
"""Patches that run through a block at once, unless a single frame has more: a clip's frames take turns. What a block
makes of them on the way takes ten times the bytes of the hidden states."""

Attend = Callable[..., Tensor]
"""Attention of a batch's frames, each to itself: of q, k, v and `scale`, as `Ops.segment_attention`."""


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
    pixels: Tensor | None = field(repr=False)
    """uint8 [n, channels, frames, patch, patch], until the first block."""
    hidden: Tensor | None = field(default=None, repr=False)
    """[n, hidden] between the first block and the last."""
    main: Tensor | None = field(default=None, repr=False)
    """[num_tokens, out_hidden] after the last block."""
    deepstack: list[Tensor] = field(default_factory=list, repr=False)
    next_block: int = 0

    @property
    def num_patches(self) -> int:
        t, h, w = self.grid
        return t * h * w

    @property
    def num_segments(self) -> int:
        """Frames, which do not see each other."""
        return self.grid[0]

    @property
    def segment_patches(self) -> int:
        return self.grid[1] * self.grid[2]

    @property
    def done(self) -> bool:
        return self.next_block == self.num_blocks

    @property
    def num_bytes(self) -> int:
        tensors = (self.pixels, self.hidden, self.main, *self.deepstack)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


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
        prefix = "model.visual."
        patch = Affine.take(tensors, prefix + "patch_embed.proj")
        # A convolution whose stride is its kernel is a product, and as one it is many times faster.
        self._patch = Affine(patch.weight.flatten(1), patch.bias)
        self._positions = tensors.pop(prefix + "pos_embed.weight")
        self._pixel_table = pixel_table.t().to(device, self.dtype).flatten()  # [channels * 256]
        self._first_of_channel = (torch.arange(config.in_channels, dtype=torch.int32, device=device) * 256).view(
            -1, 1, 1, 1
        )
        self._frames = FrameTable(self._positions, config.merge_size, config.head_dim, config.rope_theta)
        self._blocks = [_take_block(tensors, f"{prefix}blocks.{i}.") for i in range(config.depth)]
        self._merger = Merger.take(tensors, prefix + "merger.")
        self._deepstack_mergers = {
            block: Merger.take(tensors, f"{prefix}deepstack_merger_list.{level}.")
            for level, block in enumerate(config.deepstack_blocks)
        }
        self._level_blocks = [*config.deepstack_blocks, config.depth - 1]  # after which each level is made

    @property
    def dtype(self) -> torch.dtype:
        return self._positions.dtype

    def feature_bytes(self, num_tokens: int) -> int:
        """Bytes of the features of an item of `num_tokens`: main and every DeepStack level."""
        levels = 1 + len(self.config.deepstack_blocks)
        return num_tokens * levels * self.config.out_hidden_size * self.dtype.itemsize

    def begin(self, pixels: Tensor, grid: tuple[int, int, int]) -> VisionState:
        """Take one item in: uint8 [n, channels, frames, patch, patch] in merge-block order, on any device.

        Of `frames` there are as many as a patch is deep, or one, which is then shown that often (pictures).
        """
        config = self.config
        t, h, w = grid
        if pixels.shape[0] != t * h * w or h % config.merge_size or w % config.merge_size:
            raise ValueError(f"{pixels.shape[0]} patches do not fill a grid of {grid} by {config.merge_size}")
        return VisionState(grid, len(self._blocks), pixels)

    def canvas(self, num_patches: int) -> VisionCanvas:
        """Buffers for `run_padded`, for up to so many patches."""
        return VisionCanvas(num_patches, self.config, self.dtype, self._positions.device)

    @torch.inference_mode()
    def advance(
        self, states: VisionState | Sequence[VisionState], num_blocks: int, padded: PaddedBlocks | None = None
    ) -> None:
        """Run up to `num_blocks` more blocks; several items at the same block go through them as one batch.

        With `padded` they go through its window, into which they fit: see `num_segments` and `num_patches` of states.
        """
        items = [states] if isinstance(states, VisionState) else list(states)
        if len({state.next_block for state in items}) != 1:
            raise ValueError(f"items at blocks {[state.next_block for state in items]} cannot advance together")
        first = items[0].next_block
        last = min(first + num_blocks, len(self._blocks))
        if first == last:
            return
        frames = [self._frames.get(h, w) for t, h, w in (state.grid for state in items) for _ in range(t)]
        if padded is None:
            self._advance_exact(items, frames, first, last)
        else:
            self._advance_padded(items, frames, first, last, padded)
        for state in items:
            state.next_block = last

    def _advance_exact(self, items: Sequence[VisionState], frames: Sequence[Frame], first: int, last: int) -> None:
        hidden = self._hidden(items, frames)
        cos, sin = torch.cat([frame.cos for frame in frames]), torch.cat([frame.sin for frame in frames])
        groups = [  # of frames: none looks at another
            (hidden[start:end], cos[start:end], sin[start:end], partial(self._ops.segment_attention, lengths=segments))
            for start, end, segments in _groups([frame.num_patches for frame in frames])
        ]
        num_tokens = self._num_tokens(items)
        for index in range(first, last):
            for group in groups:
                self._run_block(self._blocks[index], *group)
            if index in self._deepstack_mergers:
                level = self._deepstack_mergers[index](hidden, self._ops)
                for state, part in zip(items, _parts(level, num_tokens), strict=True):
                    state.deepstack.append(part)
        ended = last == len(self._blocks)
        num_patches = [state.num_patches for state in items]
        rows = _parts(self._merger(hidden, self._ops), num_tokens) if ended else _parts(hidden, num_patches)
        for state, part in zip(items, rows, strict=True):
            state.main, state.hidden = (part, None) if ended else (None, part)

    def _advance_padded(
        self, items: Sequence[VisionState], frames: Sequence[Frame], first: int, last: int, padded: PaddedBlocks
    ) -> None:
        """Into the window, through the blocks, and out of it: an item's new levels as one copy."""
        window, num_tokens = padded.window, self._num_tokens(items)
        hidden = window.hidden[: sum(state.num_patches for state in items)]
        self._hidden(items, frames, hidden)
        padded.canvas.show(tuple(state.grid for state in items), frames)
        padded.run(first, last)
        made = [level for level, block in enumerate(self._level_blocks) if first <= block < last]
        if made:
            levels = window.levels[made[0] : made[-1] + 1, : sum(num_tokens)]
            for state, part in zip(items, _copies(levels, num_tokens, dim=1), strict=True):
                state.deepstack += part.unbind()
        if last == len(self._blocks):
            for state in items:
                state.main, state.hidden = state.deepstack.pop(), None
        else:
            for state, part in zip(items, _copies(hidden, [state.num_patches for state in items]), strict=True):
                state.hidden = part

    @torch.inference_mode()
    def run_padded(self, window: CanvasWindow, first: int, last: int) -> None:
        """Blocks [first, last) of the batch in the window, and the mergers among them, into its levels.

        Reads device memory only, and its launches depend on the window's size alone: what a graph records.
        """
        attend = partial(self._ops.packed_attention, tiles=window.tiles)
        for index in range(first, last):
            self._run_block(self._blocks[index], window.hidden, window.cos, window.sin, attend)
            if index in self._deepstack_mergers:
                level = window.levels[self._level_blocks.index(index)]
                level.copy_(self._deepstack_mergers[index](window.hidden, self._ops))
        if last == len(self._blocks):
            window.levels[-1].copy_(self._merger(window.hidden, self._ops))

    @torch.inference_mode()
    def finish(self, state: VisionState) -> Features:
        """The features of an item that has passed every block."""
        if state.main is None:
            raise ValueError(f"finish after {state.next_block} of {state.num_blocks} blocks")
        return Features(state.main, tuple(state.deepstack))

    def _num_tokens(self, items: Sequence[VisionState]) -> list[int]:
        return [state.num_patches // self.config.merge_size**2 for state in items]

    def _hidden(self, items: Sequence[VisionState], frames: Sequence[Frame], out: Tensor | None = None) -> Tensor:
        """The items' hidden states side by side, [n, hidden], in `out` or new memory; new items are embedded first."""
        kept = [state.hidden for state in items if state.hidden is not None]
        if kept:
            return torch.cat(kept, out=out)
        hidden = self._embed([state.pixels for state in items if state.pixels is not None])
        for state in items:
            state.pixels = None
        return torch.add(hidden, torch.cat([frame.places for frame in frames]), out=out)

    def _embed(self, pixels: Sequence[Tensor]) -> Tensor:
        """Patches of several items to [n, hidden], a bounded number at a time."""
        device, depth = self._positions.device, self.config.temporal_patch_size
        shown = [part.to(device, non_blocking=True) for part in pixels]
        if len({part.shape[2] for part in shown}) > 1:  # pictures beside clips
            shown = [part.expand(-1, -1, depth, -1, -1) for part in shown]
        whole = torch.cat(shown)
        starts = range(0, whole.shape[0], EMBEDDED_PATCHES)
        rows = [self._embed_rows(whole[start : start + EMBEDDED_PATCHES]) for start in starts]
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    def _embed_rows(self, pixels: Tensor) -> Tensor:
        values = self._pixel_table[pixels.int() + self._first_of_channel]
        values = values.expand(-1, -1, self.config.temporal_patch_size, -1, -1).flatten(1)
        return self._ops.linear(values, self._patch.weight, self._patch.bias)

    def _run_block(self, block: Block, hidden: Tensor, cos: Tensor, sin: Tensor, attend: Attend) -> None:
        """In place."""
        ops, heads = self._ops, self.config.num_heads
        qkv = ops.linear(block.norm1.norm(hidden), block.qkv.weight, block.qkv.bias)
        per_head = qkv.view(hidden.shape[0], 3 * heads, -1)
        rotated, v = ops.rotate(per_head[:, : 2 * heads], cos, sin), per_head[:, 2 * heads :]
        attended = attend(rotated[:, :heads], rotated[:, heads:], v, scale=self.config.head_dim**-0.5).flatten(1)
        hidden += ops.linear(attended, block.proj.weight, block.proj.bias)
        inner = F.gelu(ops.linear(block.norm2.norm(hidden), block.fc1.weight, block.fc1.bias), approximate="tanh")
        hidden += ops.linear(inner, block.fc2.weight, block.fc2.bias)


def _groups(segments: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Frames next to each other, as (first row, end, their segments), of `BLOCK_PATCHES` rows or one frame at most."""
    groups: list[tuple[int, int, list[int]]] = []
    for size in segments:
        start, end, own = groups[-1] if groups else (0, 0, [])
        if own and end - start + size <= BLOCK_PATCHES:
            own.append(size)
            groups[-1] = start, end + size, own
        else:
            groups.append((end, end + size, [size]))
    return groups


def _parts(whole: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Rows cut by `sizes`, each with memory of its own: a part that is kept must not keep its neighbours."""
    return [whole] if len(sizes) == 1 else _copies(whole, sizes)


def _copies(whole: Tensor, sizes: Sequence[int], dim: int = 0) -> list[Tensor]:
    parts: list[Tensor] = torch.split_with_sizes_copy(whole, list(sizes), dim)  # type: ignore[func-returns-value,assignment]
    return parts


def _take_block(tensors: Tensors, prefix: str) -> Block:
    return Block(
        norm1=Affine.take(tensors, prefix + "norm1"),
        qkv=Affine.take(tensors, prefix + "attn.qkv"),
        proj=Affine.take(tensors, prefix + "attn.proj"),
        norm2=Affine.take(tensors, prefix + "norm2"),
        fc1=Affine.take(tensors, prefix + "mlp.linear_fc1"),
        fc2=Affine.take(tensors, prefix + "mlp.linear_fc2"),
    )
