"""An engine whose device only keeps time: everything of the host is real, so that the host's own cost shows.

Its steps take as long as they are told to, and every token they draw is plain text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from prism_server.engine.build import Parts
from prism_server.engine.engine import Engine
from prism_server.engine.executor import Executor, StepHandle
from prism_server.engine.feature_cache import FeatureCache
from prism_server.engine.limits import SchedulerLimits
from prism_server.engine.messages import EngineInfo
from prism_server.engine.plan import StepPlan, StepResult
from prism_server.engine.scheduler import Scheduler
from prism_server.engine.staging import StagedItem
from prism_server.identity import namespace_digest
from prism_server.kv.cache import KVCache
from prism_server.media.item import ItemKey, Patches
from prism_server.media.pipeline import MediaPipeline
from prism_server.prompt.encoder import PromptEncoder
from prism_server.prompt.template import ChatTemplate
from prism_server.prompt.tokenizer import Tokenizer
from prism_server.settings import ServerSettings

VISION_BLOCKS = 27
FEATURE_BYTES_PER_TOKEN = 4 * 4096 * 2
"""Main and three DeepStack levels of the 8B model in BF16."""
POOL_TOKENS = 1 << 19


@dataclass(slots=True)
class PacedStep(StepHandle):
    """A launched step and what it saw of the owner. Times of `time.perf_counter`."""

    result: StepResult
    num_sequences: int
    launched_s: float
    idle_s: float
    """How long the device had had nothing to do."""
    end_s: float
    owner_cpu_s: float
    """What the owner had computed since its start."""
    late_s: float = 0.0
    """How long after the end of the step the owner went on, if it was waiting for it."""

    def wait(self) -> StepResult:
        left_s = self.end_s - time.perf_counter()
        if left_s > 0.0:
            time.sleep(left_s)
        self.late_s = time.perf_counter() - self.end_s
        return self.result


class PacedDevice(Executor):
    """Every step takes `step_ms`, after the one before it; 0: none at all. `tokens` are drawn in turn."""

    def __init__(self, step_ms: float, tokens: tuple[int, ...]) -> None:
        self.step_s = step_ms / 1e3
        self.steps: list[PacedStep] = []
        self._tokens = tokens
        self._free_s = 0.0

    def prepare(self, patches: Patches) -> StagedItem:
        return StagedItem.of(patches, torch.device("cpu"))

    def stage(self, key: ItemKey, item: StagedItem) -> None:
        pass

    def launch(self, plan: StepPlan) -> StepHandle:
        now_s = time.perf_counter()
        drawn = sum(rows.draw is not None for rows in plan.sequences)
        ids = tuple(self._tokens[(plan.step + i) % len(self._tokens)] for i in range(drawn))
        result = StepResult(plan.step, ids, (None,) * drawn, duration_ms=self.step_s * 1e3)
        idle_s, start_s = max(0.0, now_s - self._free_s), max(now_s, self._free_s)
        self._free_s = start_s + self.step_s
        step = PacedStep(result, len(plan.sequences), now_s, idle_s, self._free_s, time.thread_time())
        self.steps.append(step)
        return step

    def close(self) -> None:
        pass

    def forget(self) -> None:
        """Start the record anew."""
        self.steps = []


def paced_engine(settings: ServerSettings, step_ms: float, directory: Path | None = None) -> tuple[Engine, PacedDevice]:
    """An engine with the tokenizer, template and picture rules of a checkpoint (its weights are not read).

    Raises StartupError where the directory lacks one of them.
    """
    directory = directory or settings.model.directory
    tokenizer = Tokenizer.load(directory)
    template = ChatTemplate.load(directory, tokenizer.added_tokens, tokenizer.named_tokens)
    media = MediaPipeline.from_settings(settings.media, directory)
    page_tokens, engine = settings.kv.page_tokens, settings.engine
    num_pages = POOL_TOKENS // page_tokens
    namespace = namespace_digest("paced", "", settings.kv.dtype, media.config.fingerprint)
    limits = SchedulerLimits(
        max_context_tokens=engine.max_context_tokens,
        max_running_sequences=engine.max_running_sequences,
        max_step_tokens=engine.max_step_tokens,
        chunk_tokens=engine.chunk_tokens,
        step_budget_ms=engine.step_budget_ms,
        ageing_s=engine.ageing_ms / 1e3,
        eos_token_ids=frozenset(tokenizer.eos_ids),
    )
    scheduler = Scheduler(
        limits,
        KVCache(num_pages, page_tokens, 0, settings.kv.prefix_cache),
        FeatureCache(engine.feature_cache_bytes),
        lambda num_tokens: num_tokens * FEATURE_BYTES_PER_TOKEN,
        VISION_BLOCKS,
    )
    device = PacedDevice(step_ms, tuple(map(int, tokenizer.encode_runs([" the cat sat on the mat, and it was."])[0])))
    info = EngineInfo(
        model_name="paced",
        revision="",
        namespace=namespace.hex(),
        layout=media.config.fingerprint,
        kv_dtype=settings.kv.dtype,
        page_tokens=page_tokens,
        total_pages=num_pages,
        bytes_per_token=0,
        max_context_tokens=engine.max_context_tokens,
        device="paced",
        backend="none",
        dtype="none",
    )
    prompts = PromptEncoder(tokenizer, template, page_tokens, namespace, engine.max_context_tokens)
    return Engine(Parts(media, prompts, scheduler, device, info), settings), device
