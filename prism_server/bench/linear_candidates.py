"""The products of Qwen3-VL-8B, and all the ways to cut them that `linear_search` tries."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from prism_server.ops.triton import linear
from prism_server.ops.triton.linear_configs import ProductClass, ProductConfig

HIDDEN = 4096
EPS = 1e-6
MAX_SHARED_BYTES = 220 << 10
MAX_SUMS_PER_THREAD = 128
MAX_X_PER_THREAD = 32
"""Of a fused norm: beyond, registers are spilled."""
MAX_PROGRAMS = 900
"""Of a layer's products: more are more starts and ends than work."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A product of the 8B model; `copies` of its weight are read in turn."""

    product_class: ProductClass
    weight_rows: int
    depth: int
    copies: int

    @property
    def num_columns(self) -> int:
        return self.weight_rows // 2 if self.product_class == ProductClass.GATE_UP else self.weight_rows

    @property
    def weight_bytes(self) -> int:
        return self.weight_rows * self.depth * 2

    def call(
        self,
        x: Tensor,
        weight: Tensor,
        config: ProductConfig,
        *,
        norm: Tensor | None = None,
        residual: Tensor | None = None,
        pdl: bool = True,
    ) -> Tensor:
        """The product as the model asks for it: with `norm` [depth] or with `residual` [T, num_columns]."""
        if self.product_class in (ProductClass.OUT, ProductClass.DOWN):
            return linear.product(x, weight, config, residual=residual, pdl=pdl)
        swiglu = self.product_class == ProductClass.GATE_UP
        out_dtype = torch.float32 if self.product_class == ProductClass.HEAD else None
        return linear.product(x, weight, config, norm=norm, eps=EPS, swiglu=swiglu, out_dtype=out_dtype, pdl=pdl)

    def activations(self, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """Random x, norm and residual on the GPU."""
        sizes = ((num_rows, self.depth), (self.depth,), (num_rows, self.num_columns))
        x, norm, residual = (torch.randn(size, dtype=torch.bfloat16, device="cuda") for size in sizes)
        return x, norm, residual


SHAPES = {
    shape.product_class: shape
    for shape in (
        Shape(ProductClass.OUT, HIDDEN, HIDDEN, 24),
        Shape(ProductClass.GATE_UP, 24576, HIDDEN, 20),
        Shape(ProductClass.DOWN, HIDDEN, 12288, 20),
        Shape(ProductClass.QKV, 6144, HIDDEN, 24),
        Shape(ProductClass.HEAD, 151936, HIDDEN, 4),
    )
}

Block = tuple[int, int, int, int]
BLOCKS: dict[int, tuple[Block, ...]] = {
    16: (
        (32, 256, 4, 4), (64, 128, 4, 4), (32, 128, 4, 6), (32, 256, 4, 3), (64, 64, 4, 6), (64, 128, 4, 3),
        (16, 256, 4, 4), (32, 512, 4, 3), (64, 256, 4, 3), (32, 128, 2, 6), (64, 64, 4, 4), (32, 256, 8, 4),
        (16, 512, 4, 3), (32, 128, 4, 4), (128, 64, 4, 4), (128, 128, 4, 3), (128, 128, 8, 3), (16, 512, 2, 4),
        (128, 64, 8, 6), (64, 128, 8, 4), (32, 512, 8, 3), (16, 1024, 4, 3),
    ),
    32: (
        (32, 256, 4, 3), (64, 128, 4, 4), (64, 64, 4, 6), (32, 128, 4, 6), (64, 128, 4, 3), (128, 64, 4, 4),
        (32, 256, 4, 4), (64, 256, 4, 3), (128, 128, 4, 3), (32, 128, 4, 4), (128, 64, 8, 6), (64, 64, 4, 4),
        (32, 256, 8, 3), (128, 128, 8, 3), (64, 128, 8, 4), (32, 512, 4, 3),
    ),
    64: (
        (64, 128, 4, 3), (64, 64, 4, 6), (128, 64, 4, 4), (64, 128, 4, 4), (128, 64, 8, 4), (32, 128, 4, 4),
        (128, 128, 4, 3), (64, 64, 4, 4), (32, 256, 4, 3), (128, 128, 8, 3), (64, 128, 8, 4), (32, 128, 8, 4),
        (256, 64, 8, 3),
    ),
    128: (
        (64, 64, 4, 4), (128, 64, 4, 4), (128, 64, 8, 4), (64, 128, 4, 3), (128, 64, 8, 3), (128, 64, 4, 3),
        (64, 128, 8, 3), (32, 128, 4, 4), (128, 128, 8, 3), (256, 64, 8, 3), (64, 64, 8, 5), (256, 64, 8, 4),
        (32, 64, 4, 5),
    ),
}  # fmt: skip
"""Per bucket of rows, most promising first: outputs and inputs of a block, warps, pipeline stages."""
SPLITS = {
    ProductClass.QKV: (1, 2),
    ProductClass.OUT: (1, 2, 4),
    ProductClass.DOWN: (1, 2, 4, 8),
    ProductClass.GATE_UP: (1,),
    ProductClass.HEAD: (1,),
}


def candidates(shape: Shape, bucket: int) -> list[ProductConfig]:
    """Every cut worth a try for a shape, most promising first."""
    sides = 2 if shape.product_class == ProductClass.GATE_UP else 1
    normed = shape.product_class in (ProductClass.QKV, ProductClass.GATE_UP, ProductClass.HEAD)
    found = []
    for block_n, block_k, num_warps, num_stages in BLOCKS[bucket]:
        shared_bytes = num_stages * block_k * (block_n * sides + bucket) * 2
        sums_per_thread = block_n * sides * bucket // (32 * num_warps)
        x_per_thread = bucket * block_k // (32 * num_warps)
        may_fuse = normed and bucket <= 32 and x_per_thread <= MAX_X_PER_THREAD
        if shared_bytes > MAX_SHARED_BYTES or sums_per_thread > MAX_SUMS_PER_THREAD:
            continue
        for split_k in SPLITS[shape.product_class]:
            for tma in (True, False):
                for fused in (False, True) if may_fuse and split_k == 1 else (False,):
                    config = ProductConfig(block_n, block_k, num_warps, num_stages, split_k, fused, tma)
                    programs = shape.num_columns // block_n * split_k
                    fits = config.fitted(shape.num_columns, shape.depth) == config
                    if fits and (programs <= MAX_PROGRAMS or shape.product_class == ProductClass.HEAD):
                        found.append(config)
    return found


Task = tuple[Shape, int, ProductConfig]


def all_tasks() -> list[Task]:
    """Candidates of all shapes and buckets of rows, in turns."""
    ranked = [
        (rank, (shape, bucket, config))
        for shape in SHAPES.values()
        for bucket in BLOCKS
        for rank, config in enumerate(candidates(shape, bucket))
    ]
    return [task for _, task in sorted(ranked, key=lambda entry: entry[0])]


def compile_one(task: Task) -> str | None:
    """Fills Triton's cache on disk, in a process of its own; what is wrong with the cut, else None."""
    shape, bucket, config = task
    try:
        x, norm, residual = shape.activations(bucket)
        weight = torch.zeros(shape.weight_rows, shape.depth, dtype=torch.bfloat16, device="cuda")
        shape.call(x, weight, config, norm=norm, residual=residual)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    return None
