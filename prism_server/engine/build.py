"""From settings to the parts of an engine: checkpoint, model, pages, scheduler. The only place that wires them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from prism_server.capacity.models import WeightDtype
from prism_server.engine.device_build import DeviceBuilder
from prism_server.engine.executor import Executor
from prism_server.engine.feature_cache import FeatureCache
from prism_server.engine.limits import SchedulerLimits
from prism_server.engine.messages import EngineInfo
from prism_server.engine.progress import Progress
from prism_server.engine.scheduler import Scheduler
from prism_server.errors import StartupError
from prism_server.identity import Digest, framed_digest, namespace_digest
from prism_server.kv.cache import KVCache
from prism_server.media.pipeline import MediaPipeline
from prism_server.media.qwen import normalised_lut
from prism_server.model.config import ModelConfig
from prism_server.model.qwen3_vl import Qwen3VL
from prism_server.ops import Ops, make_ops
from prism_server.prompt.encoder import PromptEncoder
from prism_server.prompt.template import ChatTemplate
from prism_server.prompt.tokenizer import Tokenizer
from prism_server.settings import ModelSettings, ServerSettings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Parts:
    """Everything that an engine is made of."""

    media: MediaPipeline
    prompts: PromptEncoder
    scheduler: Scheduler
    executor: Executor
    info: EngineInfo


def build_parts(settings: ServerSettings, progress: Callable[[Progress], None]) -> Parts:
    """Load and wire everything. Raises StartupError, in one line, for what cannot work."""
    directory = settings.model.directory
    if not directory.is_dir():
        raise StartupError(f"model.path: {directory} is not a directory (`demo` is the bundled model)")
    place = _device(settings)
    ops = make_ops(settings.model.backend, place)
    dtype = _dtype(settings, place)
    progress(Progress("reading the tokenizer"))
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory, tokenizer.added_tokens, tokenizer.named_tokens)
    media = MediaPipeline.from_settings(settings.media, directory)
    lut = torch.from_numpy(normalised_lut(media.config))
    model = _model(settings, place, dtype, ops, progress, lut)
    layout = model.config.page_layout(settings.kv.page_tokens, settings.kv.dtype)
    eos_token_ids = tuple(sorted(tokenizer.eos_ids))
    device = DeviceBuilder(settings, model, layout, eos_token_ids, progress).build()
    context = device.max_context_tokens
    namespace = namespace_digest(
        _model_fingerprint(settings.model), settings.model.revision, layout.kv_dtype, media.fingerprint
    )
    kv = KVCache(device.num_pages, layout.page_tokens, device.num_host_slots, settings.kv.prefix_cache)
    scheduler = Scheduler(
        _limits(settings, context, frozenset(eos_token_ids), device.max_replayed_tokens),
        kv,
        FeatureCache(settings.engine.feature_cache_bytes),
        model.vision.feature_bytes,
        model.config.vision.depth,
    )
    for seen in device.observations:
        scheduler.cost.observe(seen)
    prompts = PromptEncoder(tokenizer, template, layout.page_tokens, namespace, context, settings.media.video_prompt)
    info = EngineInfo(
        model_name=settings.model.served_name or settings.model.path.rstrip("/").rsplit("/", 1)[-1],
        revision=settings.model.revision,
        namespace=namespace.hex(),
        layout=media.fingerprint,
        kv_dtype=layout.kv_dtype,
        page_tokens=layout.page_tokens,
        total_pages=device.num_pages,
        bytes_per_token=layout.bytes_per_token,
        max_context_tokens=context,
        device=str(model.device),
        backend=ops.name,
        dtype=str(dtype).removeprefix("torch."),
        graphs=device.num_graphs,
        memory=device.memory,
    )
    return Parts(media, prompts, scheduler, device.runner, info)


def _model(
    settings: ServerSettings,
    device: torch.device,
    dtype: torch.dtype,
    ops: Ops,
    progress: Callable[[Progress], None],
    pixel_table: torch.Tensor,
) -> Qwen3VL:
    model, directory = settings.model, settings.model.directory
    weights: WeightDtype = "fp32" if dtype == torch.float32 else "bf16"
    fp8_head = ModelConfig.from_dir(directory).text.has_fp8_head(model.fp8_head, ops.name, weights)
    if model.load_format == "random":
        making = partial(_report, progress, "making random weights")
        return Qwen3VL.random(directory, device, dtype, ops, making, pixel_table, fp8_head)
    loading = partial(_report, progress, "loading weights")
    return Qwen3VL.load(directory, device, dtype, ops, loading, pixel_table, model.load_threads, fp8_head)


def _report(progress: Callable[[Progress], None], stage: str, done: int, total: int) -> None:
    progress(Progress(stage, done, total))


def _limits(
    settings: ServerSettings, context: int, eos_token_ids: frozenset[int], max_replayed_tokens: int
) -> SchedulerLimits:
    engine = settings.engine
    return SchedulerLimits(
        max_context_tokens=context,
        max_running_sequences=engine.max_running_sequences,
        max_step_tokens=engine.max_step_tokens,
        chunk_tokens=engine.chunk_tokens,
        step_budget_ms=engine.step_budget_ms,
        max_replayed_tokens=max_replayed_tokens,
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


def _model_fingerprint(settings: ModelSettings) -> str:
    """Tells models apart whatever their path: configuration, tokenizer, names and sizes of the weight files."""
    directory = settings.directory
    fields: list[str | bytes | int] = []
    for name in ("config.json", "tokenizer.json", "model.safetensors.index.json"):
        path = directory / name
        fields += [name, path.read_bytes() if path.is_file() else b""]
    weights = [] if settings.load_format == "random" else sorted(directory.glob("*.safetensors"))
    for path in weights:
        fields += [path.name, path.stat().st_size]
    digest: Digest = framed_digest("model", fields)
    return digest.hex()
