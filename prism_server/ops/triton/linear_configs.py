"""Block shapes of skinny products, as measured by `prism_server.bench.linear_search` on an H200."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

ROW_BUCKETS = (16, 32, 64, 128)
"""Row counts that a kernel is compiled for; fewer rows are padded in registers, not in memory."""
MIN_PROGRAMS = 100
"""A product of fewer outputs gets smaller blocks, so that most of a GPU's 132 multiprocessors have a program."""
THREADS_PER_WARP = 32
PREFETCH_ALIGN_COLUMNS = 8
"""A bulk prefetch is a multiple of 16 bytes."""


class ProductClass(StrEnum):
    """Products of a layer, by what surrounds them and by the side on which they are long."""

    QKV = "qkv"
    OUT = "out"
    GATE_UP = "gate_up"
    DOWN = "down"
    HEAD = "head"


@dataclass(frozen=True, slots=True)
class ProductConfig:
    """How a product is cut: a program owns `block_n` outputs and a `split_k`-th of the inputs."""

    block_n: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 4
    split_k: int = 1
    """The same for all row counts of a class above 16 rows: it decides the order of sums. Up to 16 rows the bytes of
    the weights are all that counts, and splitting costs 1 to 4 % of them."""
    fused_norm: bool = False
    """The norm is computed in every program; else a small kernel does it first."""
    tma: bool = True
    """Weight tiles come by the bulk tensor copy engine, else by asynchronous copies of 16 bytes."""
    prefetch_columns: int = 512
    """So much of each row of its weight does a program ask into the L2 before it waits for the kernel before it."""

    def __post_init__(self) -> None:
        blocks = (self.block_n, self.block_k, self.num_warps)
        if any(size < 1 or size & (size - 1) for size in blocks) or min(self.block_n, self.block_k) < 16:
            raise ValueError(f"blocks and warps are powers of two, blocks at least 16: {self}")
        if min(self.split_k, self.num_stages) < 1 or self.prefetch_columns < 0:
            raise ValueError(f"not a way to cut a product: {self}")
        if self.fused_norm and self.split_k > 1:
            raise ValueError(f"a norm needs all inputs in one program: {self}")

    @property
    def prefetch_parts(self) -> int:
        """Runs into which a row's prefetch is cut, so that each thread asks for one."""
        return max(1, self.num_warps * THREADS_PER_WARP // self.block_n)

    def fitted(self, num_columns: int, depth: int) -> ProductConfig:
        """This cut for a product of `num_columns` outputs and `depth` inputs, which its blocks need not divide."""
        split_k, block_k, block_n = self.split_k, self.block_k, self.block_n
        while depth % (16 * split_k):
            split_k -= 1
        while depth // split_k % block_k:
            block_k //= 2
        while block_n > 16 and -(-num_columns // block_n) * split_k < MIN_PROGRAMS:
            block_n //= 2
        config = replace(self, split_k=split_k, block_k=block_k, block_n=block_n)
        prefetch = min(config.prefetch_columns, depth // split_k)
        return replace(config, prefetch_columns=prefetch - prefetch % (PREFETCH_ALIGN_COLUMNS * config.prefetch_parts))


def rows_bucket(num_rows: int) -> int:
    return next(bucket for bucket in ROW_BUCKETS if num_rows <= bucket)


CONFIGS: dict[tuple[ProductClass, int], ProductConfig] = {
    (ProductClass.QKV, 16): ProductConfig(32, 128, num_warps=2, num_stages=6, split_k=2, prefetch_columns=256),
    (ProductClass.QKV, 32): ProductConfig(64, 128, split_k=2, tma=False, prefetch_columns=256),
    (ProductClass.QKV, 64): ProductConfig(64, 128, num_stages=3, split_k=2, prefetch_columns=256),
    (ProductClass.QKV, 128): ProductConfig(64, 64, split_k=2, tma=False, prefetch_columns=256),
    (ProductClass.OUT, 16): ProductConfig(16, 512, num_warps=2),
    (ProductClass.OUT, 32): ProductConfig(64, 256, num_stages=3, split_k=2, tma=False),
    (ProductClass.OUT, 64): ProductConfig(64, 128, split_k=2, tma=False, prefetch_columns=256),
    (ProductClass.OUT, 128): ProductConfig(
        64, 64, num_warps=8, num_stages=5, split_k=2, tma=False, prefetch_columns=256
    ),
    (ProductClass.GATE_UP, 16): ProductConfig(32, 128, tma=False, prefetch_columns=0),
    (ProductClass.GATE_UP, 32): ProductConfig(64, 64, tma=False, prefetch_columns=256),
    (ProductClass.GATE_UP, 64): ProductConfig(64, 64, prefetch_columns=256),
    (ProductClass.GATE_UP, 128): ProductConfig(64, 64, num_warps=8, num_stages=5, tma=False, prefetch_columns=0),
    (ProductClass.DOWN, 16): ProductConfig(16, 512, num_warps=2, prefetch_columns=1024),
    (ProductClass.DOWN, 32): ProductConfig(64, 256, num_stages=3, split_k=2, tma=False, prefetch_columns=256),
    (ProductClass.DOWN, 64): ProductConfig(64, 128, num_warps=8, split_k=2, tma=False),
    (ProductClass.DOWN, 128): ProductConfig(64, 64, num_warps=8, num_stages=5, split_k=2, tma=False),
    (ProductClass.HEAD, 16): ProductConfig(64, 128, num_stages=3, prefetch_columns=0),
    (ProductClass.HEAD, 32): ProductConfig(64, 128, num_stages=3, prefetch_columns=256),
    (ProductClass.HEAD, 64): ProductConfig(64, 64, num_stages=6, tma=False),
    (ProductClass.HEAD, 128): ProductConfig(256, 64, num_warps=8, prefetch_columns=0),
}
