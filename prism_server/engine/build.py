"""From settings to the parts of an engine: checkpoint, model, pages, scheduler. The only place that wires them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch

from prism_server.capacity.models import resolve_shape
from prism_server.capacity.page_layout import PageLayout
from prism_server.capacity.plan import plan_pages
from prism_server.engine.executor import Executor
from prism_server.engine.feature_cache import FeatureCache
from prism_server.engine.limits import SchedulerLimits
from prism_server.engine.runner import Runner
from prism_server.engine.scheduler import Scheduler
from prism_server.errors import StartupError
from prism_server.identity import Digest, framed_digest, namespace_digest
from prism_server.kv.cache import KVCache
from prism_server.media.pipeline import MediaPipeline
from prism_server.media.qwen import normalised_lut
from prism_server.model.qwen3_vl import Qwen3VL
from prism_server.ops import make_ops
from prism_server.ops.kv_storage import HostPages, PagedKV
from prism_server.prompt.encoder import PromptEncoder
from prism_server.prompt.template import ChatTemplate
from prism_server.prompt.tokenizer import Tokenizer
from prism_server.settings import GIB, ServerSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

CPU_POOL_BYTES = 1 * GIB
"""The page pool of a CPU server that names no size."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the start is: a stage and, where it has a size, bytes."""

    stage: str
    done: int = 0
    total: int = 0


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that an engine is made of."""

    media: MediaPipeline
    prompts: PromptEncoder
    scheduler: Scheduler
    executor: Executor
    info: dict[str, Any]


def build_parts(settings: ServerSettings, progress: Callable[[Progress], None]) -> Parts:
    """Load and wire everything. Raises StartupError, in one line, for what cannot work."""
    directory = settings.model.directory
    if not directory.is_dir():
        raise StartupError(f"model.path: {directory} is not a directory (`demo` is the bundled model)")
    device = _device(settings)
    ops = make_ops(settings.model.backend, device)
    dtype = _dtype(settings, device)
    progress(Progress("reading the tokenizer"))
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory, tokenizer.added_tokens, tokenizer.named_tokens)
    media = MediaPipeline.from_settings(settings.media, directory)
    lut = torch.from_numpy(normalised_lut(media.config))
    model = Qwen3VL.load(
        directory, device, dtype, ops, lambda done, total: progress(Progress("loading weights", done, total)), lut
    )
    layout = model.config.page_layout(settings.kv.page_tokens, settings.kv.dtype)
    num_pages = _num_pages(settings, layout, device)
    context = _context(settings, model, num_pages * layout.page_tokens)
    progress(Progress("allocating pages", num_pages * layout.page_bytes, num_pages * layout.page_bytes))
    num_host_slots = layout.pages_in(settings.kv.host_bytes)
    namespace = namespace_digest(
        _model_fingerprint(directory), settings.model.revision, layout.kv_dtype, media.config.fingerprint
    )
    executor = Runner(
        model,
        _allocated("kv.memory_bytes", num_pages * layout.page_bytes, lambda: PagedKV(layout, num_pages, device)),
        _allocated(
            "kv.host_bytes", num_host_slots * layout.page_bytes, lambda: _host_pages(layout, num_host_slots, device)
        ),
        num_slots=settings.engine.max_running_sequences,
        max_pages_per_sequence=min(num_pages, layout.pages_for(context)),
        eos_token_ids=tuple(sorted(tokenizer.eos_ids)),
        threads=settings.model.threads or (_cpu_threads() if device.type == "cpu" else 0),
    )
    kv = KVCache(num_pages, layout.page_tokens, num_host_slots, settings.kv.prefix_cache)
    scheduler = Scheduler(
        _limits(settings, context, frozenset(tokenizer.eos_ids)),
        kv,
        FeatureCache(settings.engine.feature_cache_bytes),
        model.vision.feature_bytes,
        model.config.vision.depth,
    )
    prompts = PromptEncoder(tokenizer, template, layout.page_tokens, namespace, context)
    info = {
        "model_name": settings.model.served_name or settings.model.path.rstrip("/").rsplit("/", 1)[-1],
        "revision": settings.model.revision,
        "namespace": namespace.hex(),
        "layout": media.config.fingerprint,
        "kv_dtype": layout.kv_dtype,
        "page_tokens": layout.page_tokens,
        "total_pages": num_pages,
        "bytes_per_token": layout.bytes_per_token,
        "max_context_tokens": context,
        "device": str(device),
        "backend": ops.name,
        "dtype": str(dtype).removeprefix("torch."),
    }
    return Parts(media, prompts, scheduler, executor, info)


def _allocated(option: str, num_bytes: int, allocate: Callable[[], T]) -> T:
    """What `allocate` makes; StartupError where the memory is not there."""
    try:
        return allocate()
    except RuntimeError as error:  # torch's own out-of-memory errors are RuntimeErrors, on CPU and CUDA alike
        raise StartupError(
            f"{option}: {num_bytes} bytes could not be allocated: {str(error).splitlines()[0]}"
        ) from error


def _host_pages(layout: PageLayout, num_slots: int, device: torch.device) -> HostPages | None:
    return HostPages(layout, num_slots, pinned=device.type == "cuda") if num_slots else None


def _cpu_threads() -> int:
    """Half of the cores: torch's threads wait for the slowest of them, and requests need a core, too."""
    return max(1, (os.cpu_count() or 1) // 2)


def _limits(settings: ServerSettings, context: int, eos_token_ids: frozenset[int]) -> SchedulerLimits:
    engine = settings.engine
    return SchedulerLimits(
        max_context_tokens=context,
        max_running_sequences=engine.max_running_sequences,
        max_step_tokens=engine.max_step_tokens,
        chunk_tokens=engine.chunk_tokens,
        step_budget_ms=engine.step_budget_ms,
        ageing_s=engine.ageing_ms / 1e3,
        eos_token_ids=eos_token_ids,
    )


def _device(settings: ServerSettings) -> torch.device:
    name = settings.model.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def _dtype(settings: ServerSettings, device: torch.device) -> torch.dtype:
    name = settings.model.dtype
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return DTYPES[name]


def _num_pages(settings: ServerSettings, layout: PageLayout, device: torch.device) -> int:
    """Pages by the configured bytes, else by what the device has left beside weights and working memory."""
    num_bytes = settings.kv.memory_bytes
    if not num_bytes and device.type == "cuda":
        num_bytes = _cuda_pool_bytes(settings, device)
    num_pages = layout.pages_in(num_bytes or CPU_POOL_BYTES)
    if num_pages < 1:
        raise StartupError(
            f"kv.memory_bytes: {num_bytes} bytes hold no page; one page of {layout.page_tokens} tokens "
            f"is {layout.page_bytes} bytes"
        )
    return num_pages


def _cuda_pool_bytes(settings: ServerSettings, device: torch.device) -> int:
    """The paper plan on the real card's memory, or on this server's part of it."""
    _, card_bytes = torch.cuda.mem_get_info(device)
    total_bytes = min(settings.kv.gpu_memory_bytes or card_bytes, card_bytes)
    plan = plan_pages(settings.plan_request(resolve_shape(str(settings.model.directory)), total_bytes))
    if not plan.fits:
        raise StartupError(plan.refusal())
    return plan.kv_bytes


def _context(settings: ServerSettings, model: Qwen3VL, pool_tokens: int) -> int:
    """The longest context that settings, model and pool all allow."""
    asked, known = settings.engine.max_context_tokens, model.config.text.max_position_embeddings
    context = min(asked, known, pool_tokens)
    if context < asked:
        logger.info(
            "context: %d tokens (asked for %d, the model knows %d, the pool holds %d)",
            context,
            asked,
            known,
            pool_tokens,
        )
    return context


def _model_fingerprint(directory: Path) -> str:
    """Tells models apart whatever their path: configuration, tokenizer, names and sizes of the weight files."""
    fields: list[str | bytes | int] = []
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        path = directory / name
        fields += [name, path.read_bytes() if path.is_file() else b""]
    for path in sorted(directory.glob("*.safetensors")):
        fields += [path.name, path.stat().st_size]
    digest: Digest = framed_digest("model", fields)
    return digest.hex()
