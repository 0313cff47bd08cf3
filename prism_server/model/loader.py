"""Safetensors files to tensors on the device, each checked against what the configuration asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from prism_server.errors import StartupError
from prism_server.model.config import ModelConfig, TextConfig, VisionConfig, read_json

Tensors = dict[str, Tensor]
Shape = tuple[int, ...]
Progress = Callable[[int, int], None]
"""Called with (loaded bytes, total bytes) after each tensor, bytes as they lie in the files."""

STORED_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
"""The types that released weights have; others (quantised ones) would need their own arithmetic."""
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


def expected_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Every tensor of the model by its released name."""
    shapes = _text_shapes(config.text) | _vision_shapes(config.vision)
    if not config.text.tied_head:
        shapes["lm_head.weight"] = (config.text.vocab_size, config.text.hidden_size)
    return shapes


def load_tensors(
    directory: Path,
    expected: Mapping[str, Shape],
    device: torch.device | str,
    dtype: torch.dtype,
    progress: Progress | None = None,
) -> Tensors:
    """Exactly the `expected` tensors, on `device` in `dtype`.

    Raises StartupError, naming the tensor, for one that is missing, not expected, of another shape or of a type that
    is not plain floating point; naming the file, for one that is missing or broken. A head that is stored although it
    is tied to the embedding is passed over.
    """
    files = _files(directory)
    total_bytes = _check(directory, files, expected)
    tensors: Tensors = {}
    loaded_bytes = 0
    for file in files:
        with _opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118 (a file handle, not a mapping)
                if name not in expected:
                    continue
                stored = handle.get_tensor(name)
                tensors[name] = stored.to(device=device, dtype=dtype)
                loaded_bytes += stored.nbytes
                if progress is not None:
                    progress(loaded_bytes, total_bytes)
    return tensors


def _files(directory: Path) -> list[Path]:
    if (directory / INDEX_NAME).is_file():
        weight_map = read_json(directory / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise StartupError(f"{directory / INDEX_NAME} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = [SINGLE_NAME]
    for name in names:
        if not (directory / name).is_file():
            raise StartupError(f"{directory} has no {name}")
    return [directory / name for name in names]


def _opened(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt", device="cpu")
    except SafetensorError as error:
        raise StartupError(f"{file} is not a whole safetensors file: {error}") from error


def _check(directory: Path, files: list[Path], expected: Mapping[str, Shape]) -> int:
    """Compare the files' headers with `expected` before any weight is read; gives the bytes that will be."""
    seen: set[str] = set()
    total_bytes = 0
    for name, stored_type, shape in _headers(files):
        if name == "lm_head.weight" and name not in expected:
            continue
        if name not in expected:
            raise StartupError(f"{directory} has a tensor that the model does not: {name}")
        if name in seen:
            raise StartupError(f"{directory} has tensor {name} twice")
        if shape != expected[name]:
            raise StartupError(
                f"tensor {name} has shape {list(shape)}, the configuration asks for {list(expected[name])}"
            )
        if stored_type not in STORED_BYTES:
            raise StartupError(f"tensor {name} has type {stored_type}; known: {', '.join(STORED_BYTES)}")
        seen.add(name)
        total_bytes += torch.Size(shape).numel() * STORED_BYTES[stored_type]
    missing = sorted(set(expected) - seen)
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StartupError(f"{directory} lacks tensor {missing[0]}{others}")
    return total_bytes


def _headers(files: list[Path]) -> Iterator[tuple[str, str, Shape]]:
    for file in files:
        with _opened(file) as handle:
            for name in handle.keys():  # noqa: SIM118
                part = handle.get_slice(name)
                yield name, part.get_dtype(), tuple(part.get_shape())


def _text_shapes(config: TextConfig) -> dict[str, Shape]:
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    layer: dict[str, Shape] = {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (q_size, hidden),
        "self_attn.k_proj": (kv_size, hidden),
        "self_attn.v_proj": (kv_size, hidden),
        "self_attn.o_proj": (hidden, q_size),
        "self_attn.q_norm": (head_dim,),
        "self_attn.k_norm": (head_dim,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    prefix = "model.language_model."
    shapes: dict[str, Shape] = {
        f"{prefix}embed_tokens.weight": (config.vocab_size, hidden),
        f"{prefix}norm.weight": (hidden,),
    }
    for index in range(config.num_layers):
        shapes |= {f"{prefix}layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def _vision_shapes(config: VisionConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.intermediate_size
    group = hidden * config.merge_size**2
    patch = (config.in_channels, config.temporal_patch_size, config.patch_size, config.patch_size)
    affine: dict[str, Shape] = {"patch_embed.proj": (hidden, *patch)}
    for index in range(config.depth):
        block = f"blocks.{index}."
        affine |= {
            block + "norm1": (hidden,),
            block + "norm2": (hidden,),
            block + "attn.qkv": (3 * hidden, hidden),
            block + "attn.proj": (hidden, hidden),
            block + "mlp.linear_fc1": (inner, hidden),
            block + "mlp.linear_fc2": (hidden, inner),
        }
    mergers = {"merger.": hidden} | {f"deepstack_merger_list.{k}.": group for k in range(len(config.deepstack_blocks))}
    for merger, norm_width in mergers.items():
        affine |= {
            merger + "norm": (norm_width,),
            merger + "linear_fc1": (group, group),
            merger + "linear_fc2": (config.out_hidden_size, group),
        }
    prefix = "model.visual."
    shapes: dict[str, Shape] = {f"{prefix}pos_embed.weight": (config.num_position_embeddings, hidden)}
    for name, shape in affine.items():
        shapes[f"{prefix}{name}.weight"] = shape
        shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes
