"""Safetensors files to tensors on the device, each checked against what the configuration asks for."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from prism_server.checkpoint_files import read_object
from prism_server.errors import StartupError
from prism_server.model.config import ModelConfig, TextConfig, VisionConfig
from prism_server.model.ranges import StoredTensor, default_readers, read_tensors

Tensors = dict[str, Tensor]
Shape = tuple[int, ...]
Progress = Callable[[int, int], None]
"""Called from any thread, one call at a time, with (loaded bytes, total bytes), bytes as they lie in the files."""

STORED_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
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
    num_readers: int = 0,
) -> Tensors:
    """Exactly the `expected` tensors, on `device` in `dtype`, read by `num_readers` threads (0: one a core, at most 8).

    Raises StartupError, naming the tensor, for one that is missing, not expected, of another shape or of a type that
    is not plain floating point; naming the file, for one that is missing or broken. A head that is stored although it
    is tied to the embedding is passed over.
    """
    stored = _checked(directory, expected)
    total_bytes = sum(tensor.num_bytes for tensor in stored)
    loaded_bytes = 0

    def on_bytes(num_bytes: int) -> None:
        nonlocal loaded_bytes
        loaded_bytes += num_bytes
        if progress is not None:
            progress(loaded_bytes, total_bytes)

    tensors = {tensor.name: torch.empty(tensor.shape, dtype=dtype, device=device) for tensor in stored}
    read_tensors(stored, tensors, num_readers or default_readers(), on_bytes)
    return tensors


def _files(directory: Path) -> list[Path]:
    if (directory / INDEX_NAME).is_file():
        weight_map = read_object(directory / INDEX_NAME).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise StartupError(f"{directory / INDEX_NAME} has no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
    else:
        names = [SINGLE_NAME]
    for name in names:
        if not (directory / name).is_file():
            raise StartupError(f"{directory} has no {name}")
    return [directory / name for name in names]


def _checked(directory: Path, expected: Mapping[str, Shape]) -> list[StoredTensor]:
    """Every expected tensor as the files' headers have it, in the order of the files; no weight is read yet."""
    found: dict[str, StoredTensor] = {}
    for file in _files(directory):
        for name, stored_type, shape, offset in _headers(file):
            if name == "lm_head.weight" and name not in expected:
                continue
            if name not in expected:
                raise StartupError(f"{directory} has a tensor that the model does not: {name}")
            if name in found:
                raise StartupError(f"{directory} has tensor {name} twice")
            if shape != expected[name]:
                raise StartupError(
                    f"tensor {name} has shape {list(shape)}, the configuration asks for {list(expected[name])}"
                )
            if stored_type not in STORED_TYPES:
                raise StartupError(f"tensor {name} has type {stored_type}; known: {', '.join(STORED_TYPES)}")
            found[name] = StoredTensor(name, file, offset, STORED_TYPES[stored_type], shape)
    missing = sorted(set(expected) - set(found))
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise StartupError(f"{directory} lacks tensor {missing[0]}{others}")
    return sorted(found.values(), key=lambda tensor: (tensor.file, tensor.offset))


def _headers(file: Path) -> Iterator[tuple[str, str, Shape, int]]:
    """(name, type, shape, offset in the file) of each tensor; the library has checked the whole layout before."""
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass
    except SafetensorError as error:
        raise StartupError(f"{file} is not a whole safetensors file: {error}") from error
    with file.open("rb") as handle:
        header_bytes = int.from_bytes(handle.read(8), "little")
        header: dict[str, Any] = json.loads(handle.read(header_bytes))
    for name, facts in header.items():
        if name != "__metadata__":
            yield name, facts["dtype"], tuple(facts["shape"]), 8 + header_bytes + facts["data_offsets"][0]


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
