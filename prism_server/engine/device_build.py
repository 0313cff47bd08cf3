"""The device's side of a start: measure, size the page pool, allocate it once, capture the graphs, learn the costs."""

from __future__ import annotations

import gc
import logging
import math
import os
from collections.abc import Callable, Sequence, Sized
from dataclasses import dataclass
from fractions import Fraction
from typing import TypeVar

import torch

from prism_server.capacity.page_layout import PageLayout
from prism_server.capacity.plan import most_encoded_tokens, plan_pages
from prism_server.capacity.units import GIB
from prism_server.engine.cost_model import Observation
from prism_server.engine.encoder_graphs import PATCHES, EncoderGraphs, all_spans
from prism_server.engine.graphs import GraphFamily, capture_within, family_sizes
from prism_server.engine.memory import MemoryFigures
from prism_server.engine.progress import OnProgress, Progress
from prism_server.engine.rehearsal import Rehearsal
from prism_server.engine.runner import Runner, RunnerLimits
from prism_server.engine.step_inputs import StepSize
from prism_server.errors import StartupError
from prism_server.model.qwen3_vl import Qwen3VL
from prism_server.ops.host_pages import HostPages
from prism_server.ops.kv_storage import PagedKV
from prism_server.settings import ServerSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")

CPU_POOL_BYTES = 1 * GIB
"""The page pool of a CPU server that names no size."""
MEASURED_GRAPHS = 2
"""As many of the largest graphs are captured and thrown away to estimate what all of them will take."""


@dataclass(frozen=True, slots=True)
class BuiltDevice:
    """A runner with its pools, ready for the first plan."""

    runner: Runner
    num_pages: int
    num_host_slots: int
    max_context_tokens: int
    observations: tuple[Observation, ...]
    """What work cost in the rehearsal; none on a CPU."""
    num_graphs: int
    """Captured step sizes; the encoder's graphs are not among them."""
    max_replayed_tokens: int
    """Rows of the largest step that any graph is there for; 0 without graphs."""
    memory: dict[str, int]
    """Measured bytes by part; empty on a CPU."""


class DeviceBuilder:
    """Makes the runner of a loaded model. Raises StartupError, in one line, for what does not fit."""

    def __init__(
        self,
        settings: ServerSettings,
        model: Qwen3VL,
        layout: PageLayout,
        eos_token_ids: tuple[int, ...],
        on_progress: OnProgress,
    ) -> None:
        self._settings, self._model, self._layout = settings, model, layout
        self._eos_token_ids, self._on_progress = eos_token_ids, on_progress
        self._device = model.device
        self._is_cuda = model.device.type == "cuda"
        self._longest = min(settings.engine.max_context_tokens, model.config.text.max_position_embeddings)
        media, patches_per_token = settings.media, model.config.vision.patches_per_token
        self._item_tokens = most_encoded_tokens(media.max_image_tokens, media.max_video_tokens, patches_per_token)
        wanted = settings.engine.graphs and self._is_cuda and model.ops.supports_graphs
        most_rows = min(settings.engine.max_graph_tokens, settings.engine.max_step_tokens)
        most_sequences, fp8_head = settings.engine.max_running_sequences, model.text.has_fp8_head
        self._sizes = family_sizes(most_rows, most_sequences, fp8_head) if wanted else []
        self._patches = sorted(PATCHES, reverse=True) if wanted else []

    def build(self) -> BuiltDevice:
        """Everything, in the order that the memory needs."""
        engine = self._settings.engine
        self._model.ops.reserve(engine.max_step_tokens, engine.max_running_sequences, self._longest)
        figures = self._measured() if self._is_cuda else None
        num_pages = self._num_pages(figures)
        context = self._context(num_pages)
        num_host_slots = self._layout.pages_in(self._settings.kv.host_bytes)
        runner, limits = self._runner(num_pages, num_host_slots, context)
        observations: list[Observation] = []
        graphs = GraphFamily({})
        if figures is not None:
            graphs = self._capture(runner, figures.working_bytes)
            self._on_progress(Progress("rehearsing"))
            rehearsal = Rehearsal(runner, limits, num_pages, self._layout.page_tokens)
            rehearsal.move(num_host_slots)
            observations = rehearsal.observations(self._item_tokens)
        memory = {} if figures is None else figures.as_dict()
        return BuiltDevice(
            runner,
            num_pages,
            num_host_slots,
            context,
            tuple(observations),
            len(graphs),
            graphs.max_rows,
            memory,
        )

    # -- pages -------------------------------------------------------------------------------------------------------

    def _num_pages(self, figures: MemoryFigures | None) -> int:
        """Pages by the configured bytes, else by what was measured to be left."""
        layout, num_bytes = self._layout, self._settings.kv.memory_bytes
        if not num_bytes and figures is None:
            num_bytes = CPU_POOL_BYTES
        elif not num_bytes and figures is not None:
            num_bytes, needed = figures.pool_bytes, layout.pages_for(self._longest)
            if layout.pages_in(num_bytes) < needed:
                raise StartupError(
                    f"does not fit: a context of {self._longest:,} tokens needs {needed:,} pages, there is room for "
                    f"{layout.pages_in(num_bytes):,}: {figures.explain()}{self._way_out(num_bytes, needed)}"
                )
        num_pages = layout.pages_in(num_bytes)
        if num_pages < 1:
            raise StartupError(
                f"kv.memory_bytes: {num_bytes} bytes hold no page; one page of {layout.page_tokens} tokens "
                f"is {layout.page_bytes} bytes"
            )
        num_bytes = num_pages * layout.page_bytes
        self._on_progress(Progress("allocating pages", num_bytes, num_bytes))
        return num_pages

    def _way_out(self, num_bytes: int, needed_pages: int) -> str:
        """The end of that refusal: what alone would make it fit."""
        if not self._model.text.has_fp8_head:
            return ""
        num_bytes += self._model.config.shape("").fp8_head_bytes()
        fits = self._layout.pages_in(num_bytes) >= needed_pages
        return "; without the LM head's FP8 copy (model.fp8_head off) it fits" if fits else ""

    def _context(self, num_pages: int) -> int:
        """The longest context that settings, model and pool all allow."""
        pool_tokens, asked = num_pages * self._layout.page_tokens, self._settings.engine.max_context_tokens
        context = min(self._longest, pool_tokens)
        if context < asked:
            known = self._model.config.text.max_position_embeddings
            level = logging.WARNING if context < self._longest else logging.INFO  # the model's own end is no surprise
            text = "context: %d tokens (asked for %d, the model knows %d, the pool holds %d)"
            logger.log(level, text, context, asked, known, pool_tokens)
        return context

    def _runner(self, num_pages: int, num_host_slots: int, context: int) -> tuple[Runner, RunnerLimits]:
        layout, engine = self._layout, self._settings.engine
        limits = RunnerLimits(
            engine.max_running_sequences, min(num_pages, layout.pages_for(context)), engine.max_step_tokens
        )
        pages = _allocated(
            "kv.memory_bytes", num_pages * layout.page_bytes, lambda: PagedKV(layout, num_pages, self._device)
        )
        host = None
        if num_host_slots:
            num_bytes = num_host_slots * layout.page_bytes
            host = _allocated("kv.host_bytes", num_bytes, lambda: HostPages(layout, num_host_slots, self._is_cuda))
        threads = 0 if self._is_cuda else self._settings.model.threads or cpu_threads()
        return Runner(self._model, pages, host, limits, self._eos_token_ids, threads), limits

    # -- CUDA: measuring and capturing -------------------------------------------------------------------------------

    def _measured(self) -> MemoryFigures:
        try:
            figures = self._measure()
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
            raise StartupError(
                f"does not fit: the largest steps beside the weights, without any page: {reason}"
            ) from error
        logger.info("memory: %s", figures.explain())
        return figures

    def _measure(self) -> MemoryFigures:
        """Run the largest steps and capture the largest graphs on a small pool, and throw all of it away."""
        self._on_progress(Progress("measuring memory"))
        layout, engine = self._layout, self._settings.engine
        num_pages = max(layout.pages_for(engine.max_step_tokens), engine.max_running_sequences)
        weight_bytes = _reserved_bytes()
        runner, limits = self._runner(num_pages, 0, self._longest)
        before_bytes = _reserved_bytes()
        torch.cuda.reset_peak_memory_stats(self._device)
        Rehearsal(runner, limits, num_pages, layout.page_tokens).largest_steps(self._item_tokens)
        step_bytes = torch.cuda.max_memory_reserved(self._device) - before_bytes
        graph_bytes = self._measure_graphs(runner)
        pool_bytes = num_pages * layout.page_bytes
        weight_bytes += max(0, before_bytes - weight_bytes - pool_bytes)  # the runner's own buffers come again
        del runner
        gc.collect()
        _reserved_bytes()
        free_bytes, card_bytes = torch.cuda.mem_get_info(self._device)
        total_bytes = min(self._settings.kv.gpu_memory_bytes or card_bytes, card_bytes)
        shape = self._model.config.shape(self._settings.model.directory.name)
        return MemoryFigures(
            usable_bytes=math.floor(total_bytes * Fraction(self._settings.kv.memory_fraction)),
            free_bytes=free_bytes,
            weight_bytes=weight_bytes,
            step_bytes=step_bytes,
            graph_bytes=graph_bytes,
            feature_bytes=engine.feature_cache_bytes,
            planned_bytes=plan_pages(self._settings.plan_request(shape, total_bytes)).kv_bytes,
        )

    def _measure_graphs(self, runner: Runner) -> int:
        """What all graphs will take: the pool of the largest ones, and the driver's part of each."""
        if not self._sizes:
            return 0
        largest, patches = self._sizes[:MEASURED_GRAPHS], self._patches[:1]
        language_bytes = self._graph_bytes(lambda: runner.capture_graphs(largest, _unseen), len(self._sizes))
        runner.use_graphs(GraphFamily({}))
        num_graphs = len(self._patches) * len(all_spans(self._model.config.vision.depth))
        encoder_bytes = self._graph_bytes(lambda: runner.capture_encoder(patches, _unseen), num_graphs)
        runner.encoder.graphs = EncoderGraphs()
        return language_bytes + encoder_bytes

    def _graph_bytes(self, capture: Callable[[], Sized], num_graphs: int) -> int:
        """Of so many graphs, by those that `capture` captures: all that torch takes, and the driver's part of each."""
        reserved_bytes, free_bytes = _reserved_bytes(), self._free_bytes()
        graphs = capture()
        pool_bytes = _reserved_bytes() - reserved_bytes
        driver_bytes = max(0, free_bytes - self._free_bytes() - pool_bytes)
        return pool_bytes + driver_bytes * num_graphs // max(1, len(graphs))

    def _free_bytes(self) -> int:
        _reserved_bytes()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def _capture(self, runner: Runner, needed_bytes: int) -> GraphFamily:
        """The whole family, or what of it leaves the needed bytes free; then the encoder's graphs likewise."""

        def capture(sizes: Sequence[StepSize]) -> GraphFamily:
            runner.use_graphs(GraphFamily({}))  # what an earlier try captured
            return runner.capture_graphs(sizes, _Counted(self._on_progress, "capturing graphs", len(sizes)))

        def capture_encoder(sizes: Sequence[int]) -> EncoderGraphs:
            return runner.capture_encoder(sizes, _Counted(self._on_progress, "capturing encoder graphs", len(sizes)))

        graphs = capture_within(self._sizes, capture, self._free_bytes, needed_bytes)
        logger.info("graphs: %d of %d step sizes are captured", len(graphs), len(self._sizes))
        encoder = capture_within(self._patches, capture_encoder, self._free_bytes, needed_bytes, rows_of=int)
        text = "encoder: %d of %d sizes are captured, in %d graphs"
        logger.info(text, len(encoder.sizes), len(self._patches), len(encoder))
        return graphs


def _unseen(done: int) -> None:
    """Progress of what is measured only."""


@dataclass(frozen=True, slots=True)
class _Counted:
    """Turns counts into progress of a stage."""

    on_progress: OnProgress
    stage: str
    total: int

    def __call__(self, done: int) -> None:
        self.on_progress(Progress(self.stage, done, self.total))


def _reserved_bytes() -> int:
    """What torch holds of the card once unused blocks are given back."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def cpu_threads() -> int:
    """Half of the cores: torch's threads wait for the slowest of them, and requests need a core, too."""
    return max(1, (os.cpu_count() or 1) // 2)


def _allocated(option: str, num_bytes: int, allocate: Callable[[], T]) -> T:
    """What `allocate` makes; StartupError where the memory is not there."""
    try:
        return allocate()
    except RuntimeError as error:  # torch's own out-of-memory errors are RuntimeErrors, on CPU and CUDA alike
        raise StartupError(
            f"{option}: {num_bytes} bytes could not be allocated: {str(error).splitlines()[0]}"
        ) from error
