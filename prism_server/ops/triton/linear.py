"""Products of 1 to 128 rows with the weights, with the norm before them and SwiGLU or the residual after them."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from prism_server.ops.capability import has_tma, is_hopper
from prism_server.ops.triton.kernels.linear import rms_norm_rows, skinny_product
from prism_server.ops.triton.linear_configs import CONFIGS, ProductClass, ProductConfig, rows_bucket

MAX_SKINNY_ROWS = 128
MAX_SPLIT_TILES = 1 << 14


def is_skinny(num_rows: int, dtype: torch.dtype) -> bool:
    """Whether the functions below take `num_rows` rows of `dtype`."""
    return 1 <= num_rows <= MAX_SKINNY_ROWS and dtype == torch.bfloat16


def norm_linear(x: Tensor, norm: Tensor, eps: float, weight: Tensor) -> Tensor:
    """RMS norm of x [T, in] times norm [in], then weight [out, in] -> [T, out]."""
    return product(x, weight, _config(ProductClass.QKV, x), norm=norm, eps=eps)


def norm_swiglu(x: Tensor, norm: Tensor, eps: float, gate_up: Tensor) -> Tensor:
    """The same norm; gate_up [2n, in], gate's rows before up's -> silu(gate) * up [T, n]."""
    return product(x, gate_up, _config(ProductClass.GATE_UP, x), norm=norm, eps=eps, swiglu=True)


def linear_add(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    """residual [T, out] plus x [T, in] times weight [out, in]."""
    return product(x, weight, _config(_wide_or_deep(weight), x), residual=residual)


def norm_logits(x: Tensor, norm: Tensor, eps: float, head: Tensor) -> Tensor:
    """The same norm, then head [vocab, in] -> float32 [R, vocab], not rounded in between."""
    return product(x, head, _config(ProductClass.HEAD, x), norm=norm, eps=eps, out_dtype=torch.float32)


def product(
    x: Tensor,
    weight: Tensor,
    config: ProductConfig,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    swiglu: bool = False,
    out_dtype: torch.dtype | None = None,
    pdl: bool = True,
) -> Tensor:
    """One product, cut as `config` says. T <= 128 rows of bf16; `in` is a multiple of 16; tensors are contiguous.

    `pdl`: its programs start while the kernel before them ends, where the GPU can (compute capability 9).
    """
    num_rows, depth = x.shape
    num_columns = weight.shape[0] // 2 if swiglu else weight.shape[0]
    config = config.fitted(num_columns, depth)
    pdl, tma = pdl and is_hopper(x.device), config.tma and has_tma(x.device)
    if norm is not None and not config.fused_norm:
        x, norm = rms_norm(x, norm, eps, pdl=pdl), None
    bucket, tiles = rows_bucket(num_rows), triton.cdiv(num_columns, config.block_n)
    out = torch.empty((num_rows, num_columns), dtype=out_dtype or x.dtype, device=x.device)
    partial, arrivals = _split_buffers(config, tiles, bucket * (2 if swiglu else 1), out)
    skinny_product[tiles, config.split_k](
        x,
        x if norm is None else norm,
        weight,
        TensorDescriptor.from_tensor(weight, [config.block_n, config.block_k]) if tma else weight,
        out if residual is None else residual,
        out,
        partial,
        arrivals,
        num_rows,
        num_columns,
        depth,
        eps,
        config.prefetch_columns,
        ROWS=bucket,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        SPLIT_K=config.split_k,
        NORM=norm is not None,
        SWIGLU=swiglu,
        RESIDUAL=residual is not None,
        TMA=tma,
        PREFETCH_PARTS=config.prefetch_parts,
        PDL=pdl,
        WIDE=not x.is_cuda,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def rms_norm(x: Tensor, norm: Tensor, eps: float, *, pdl: bool = True) -> Tensor:
    """Rows of x [T, n] over their root mean square, times norm [n]; rounded once."""
    num_rows, depth = x.shape
    pdl = pdl and is_hopper(x.device)
    out = torch.empty_like(x)
    block = triton.next_power_of_2(depth)
    warps = min(16, max(1, block // 256))
    extra = {"launch_pdl": True} if pdl else {}
    rms_norm_rows[(num_rows,)](x, norm, out, depth, eps, BLOCK=block, PDL=pdl, num_warps=warps, **extra)
    return out


def _config(product_class: ProductClass, x: Tensor) -> ProductConfig:
    return CONFIGS[product_class, rows_bucket(x.shape[0])]


def _wide_or_deep(weight: Tensor) -> ProductClass:
    out, depth = weight.shape
    return ProductClass.DOWN if depth >= 2 * out else ProductClass.OUT


def _split_buffers(config: ProductConfig, tiles: int, tile_rows: int, unused: Tensor) -> tuple[Tensor, Tensor]:
    """Room for the parts of each tile's sums, and the counters of those that are there."""
    if config.split_k == 1:
        return unused, unused
    if tiles > MAX_SPLIT_TILES:
        raise ValueError(f"{tiles} tiles are enough programs: they are not split further")
    shape = (tiles, config.split_k, tile_rows, config.block_n)
    return torch.empty(shape, dtype=torch.float32, device=unused.device), _arrivals(unused.device)


@lru_cache
def _arrivals(device: torch.device) -> Tensor:
    """int32 counters, zero between kernels: a stream runs its products one after the other, so they share them."""
    return torch.zeros(MAX_SPLIT_TILES, dtype=torch.int32, device=device)
