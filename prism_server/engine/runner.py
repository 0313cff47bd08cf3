"""Executes step plans with a model: device slots, copies, one encoder batch and one forward pass a step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor

from prism_server.engine.device_timer import StepTimer
from prism_server.engine.encoder_graphs import EncoderGraphs, capture_encoder
from prism_server.engine.encoding import Encoder
from prism_server.engine.executor import Executor, StepHandle
from prism_server.engine.graphs import GraphFamily, capture_family
from prism_server.engine.language import LanguageStep, StepOutput
from prism_server.engine.packet import Section, aligned
from prism_server.engine.plan import StepPlan, StepResult
from prism_server.engine.sampler import Draw, PendingLogprobs, Sampler, SamplingWork
from prism_server.engine.staging import StagedItem
from prism_server.engine.step_inputs import DeviceSlots, StepLayout, StepSize
from prism_server.engine.transfers import to_host
from prism_server.errors import EngineFault, PrismError
from prism_server.media.item import ItemKey, Patches
from prism_server.model.qwen3_vl import Qwen3VL
from prism_server.ops.host_pages import HostPages
from prism_server.ops.kv_storage import PagedKV

SAMPLING_WORDS = 16
"""Most words that a draw puts into the packet."""
MAX_ARRAYS = 32
"""Most arrays in a packet, each of which may leave room for its alignment."""


@dataclass(frozen=True, slots=True)
class RunnerLimits:
    """Sizes that a device's fixed buffers are made for."""

    num_slots: int
    max_pages_per_sequence: int
    max_step_tokens: int

    @property
    def packet_words(self) -> int:
        step = StepLayout(StepSize(self.max_step_tokens, self.num_slots, self.num_slots)).num_words
        pages = 2 * self.num_slots * self.max_pages_per_sequence
        return aligned(step + pages + self.max_step_tokens + SAMPLING_WORDS * self.num_slots) + aligned(1) * MAX_ARRAYS


class _OnThread(StepHandle):
    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def wait(self) -> StepResult:
        return self._future.result()


@dataclass(frozen=True, eq=False, slots=True)
class RunningStep(StepHandle):
    """A step that the device has been given. Its marks: start, begin and end of the encoder's part where it has one,
    end; `moves`, if it moves pages to or from the host, when that is over."""

    plan: StepPlan
    eager: bool
    failed: dict[ItemKey, PrismError]
    moves: torch.cuda.Event | None
    timer: StepTimer
    tokens: Tensor | None = field(repr=False)
    logprobs: PendingLogprobs | None = field(repr=False)

    def wait(self) -> StepResult:
        try:
            self.timer.wait()
            if self.moves is not None:
                self.moves.synchronize()
        except RuntimeError as error:
            raise EngineFault(f"the device failed: {error}") from error
        tokens = [] if self.tokens is None else self.tokens.tolist()
        found = {} if self.logprobs is None else self.logprobs.read(tokens)
        return StepResult(
            self.plan.step,
            tuple(tokens),
            tuple(found.get(row) for row in range(len(tokens))),
            self.failed,
            self.timer.between_ms(0, -1),
            self.timer.between_ms(1, 2) if self.plan.encode else 0.0,
            self.eager,
        )


@dataclass(frozen=True, slots=True)
class _Packed:
    """What of a plan went into the packet."""

    layout: StepLayout | None
    graph: StepSize | None
    pages: tuple[Section, Section] | None
    media_rows: Section | None
    sampling: SamplingWork | None


class Runner(Executor):
    """One device.

    On CUDA `launch` gives the step to the device's stream and returns: nothing on that way waits for the device. On a
    CPU the steps run in order on a thread of the device's own. Either way the owner plans a step while the one before
    runs.
    """

    def __init__(
        self,
        model: Qwen3VL,
        kv: PagedKV,
        host: HostPages | None,
        limits: RunnerLimits,
        eos_token_ids: tuple[int, ...],
        threads: int = 0,
    ) -> None:
        self.model, self._kv, self._host = model, kv, host
        self.encoder = Encoder(model)
        self._device = model.device
        self._slots = DeviceSlots(limits.num_slots, limits.max_pages_per_sequence, limits.packet_words, self._device)
        self._sampler = Sampler(model.config.text.vocab_size, self._device, eos_token_ids, model.ops, limits.num_slots)
        self._language = LanguageStep(model, kv, self._slots)
        self.graphs = GraphFamily({})
        self._stream: torch.cuda.Stream | None = None
        self._thread: ThreadPoolExecutor | None = None
        if self._device.type == "cuda":
            self.repeats_itself = True
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            torch.cuda.synchronize(self._device)  # weights and pools were made in another stream
        else:
            self._thread = ThreadPoolExecutor(1, "prism-device")
            if threads:
                self._thread.submit(torch.set_num_threads, threads).result()

    # -- the owner's side --------------------------------------------------------------------------------------------

    def prepare(self, patches: Patches) -> StagedItem:
        return StagedItem.of(patches, self._device)

    def stage(self, key: ItemKey, item: StagedItem) -> None:
        if self._thread is None:
            self.encoder.stage(key, item)
        else:
            self._thread.submit(self.encoder.stage, key, item)  # behind what earlier plans drop

    def launch(self, plan: StepPlan) -> StepHandle:
        if self._thread is None:
            return self.start(plan)
        return _OnThread(self._thread.submit(self.execute, plan))

    def close(self) -> None:
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        if self._stream is not None:
            with contextlib.suppress(RuntimeError):  # a device that has failed has nothing to finish
                self._stream.synchronize()
            self.use_graphs(GraphFamily({}))
            self.encoder.graphs = EncoderGraphs()

    # -- graphs ------------------------------------------------------------------------------------------------------

    def capture_graphs(self, sizes: Sequence[StepSize], on_captured: Callable[[int], None]) -> GraphFamily:
        """Capture the step of each size and use the graphs from now on. Before the first launch; CUDA only."""
        assert self._stream is not None, "only CUDA has graphs"
        self.use_graphs(capture_family(sizes, self.load_empty, self.run_padded, self._stream, on_captured))
        return self.graphs

    def capture_encoder(self, sizes: Sequence[int], on_captured: Callable[[int], None]) -> EncoderGraphs:
        """The same of the encoder's blocks, by patches."""
        assert self._stream is not None, "only CUDA has graphs"
        self.encoder.graphs = EncoderGraphs()  # what an earlier try captured
        self.encoder.graphs = capture_encoder(self.model.vision, sizes, self._stream, on_captured)
        return self.encoder.graphs

    def use_graphs(self, graphs: GraphFamily) -> None:
        """Steps that fit are padded and replayed; without graphs every step is exact and eager."""
        self.graphs = graphs

    @torch.inference_mode()
    def load_empty(self, size: StepSize) -> None:
        """Send a packet of that size with nothing but padding in it."""
        layout, packet = layout_of(size), self._slots.packet
        self._slots.write_rows(layout, (), self._kv.layout.page_tokens, packet.begin(layout.num_words))
        packet.send()

    @torch.inference_mode()
    def run_padded(self, size: StepSize) -> StepOutput:
        """The step whose packet was sent, padded to `size`; what a graph records."""
        media = self._language.canvas(size.rows) if size.media else None
        output = self._language(self._slots.inputs(layout_of(size)), media, size.greedy)
        assert output is not None, "a padded step draws"
        return output

    # -- the device's side -------------------------------------------------------------------------------------------

    def execute(self, plan: StepPlan) -> StepResult:
        """Everything of a plan. Called on the device's thread."""
        return self.start(plan).wait()

    @torch.inference_mode()
    def start(self, plan: StepPlan) -> RunningStep:
        """Give a plan to the device, in the plan's order."""
        with contextlib.nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            timer = StepTimer(self._device)
            for start in plan.slot_starts:
                self._sampler.start(start)
            packed = self._pack(plan)
            timer.mark()
            self._slots.packet.send()
            if packed.pages is not None:
                self._slots.assign_pages(packed.pages)
            moves = self._copy(plan)
            failed = self._encode(plan, timer)
            tokens, logprobs = self._draw(plan, packed)
            timer.mark()
        eager = packed.layout is not None and packed.graph is None
        return RunningStep(plan, eager, failed, moves, timer, tokens, logprobs)

    def _pack(self, plan: StepPlan) -> _Packed:
        """Write the packet. The step is a graph's if there is one for its size."""
        slots, packet, sequences = self._slots, self._slots.packet, plan.sequences
        if not sequences:
            packet.begin(0)
            return _Packed(None, None, slots.append_pages(plan.pages), None, None)
        draws = [Draw(rows.slot, rows.draw) for rows in sequences if rows.draw is not None]
        greedy = self.model.text.has_fp8_head and not self._sampler.asks_for_more(draws)
        exact = StepSize.of(sequences, bool(plan.media), greedy)
        graph = self.graphs.size_or_none(exact)
        layout = layout_of(graph or exact)
        words = packet.begin(layout.num_words)
        pages = slots.append_pages(plan.pages)
        slots.write_rows(layout, sequences, self._kv.layout.page_tokens, words)
        media_rows = self.encoder.append_rows(plan.media, packet)
        return _Packed(layout, graph, pages, media_rows, self._sampler.prepare(draws, packet))

    def _copy(self, plan: StepPlan) -> torch.cuda.Event | None:
        """The plan's copies; when moves to and from the host are over, where they run beside the device's stream."""
        moves = None
        if plan.swap_in or plan.swap_out:
            assert self._host is not None, "a plan swaps, but there is no host tier"
            if plan.swap_in:
                slots, pages = zip(*plan.swap_in, strict=True)
                self._host.swap_in(self._kv, slots, pages)
            if plan.swap_out:
                pages, slots = zip(*plan.swap_out, strict=True)
                self._host.swap_out(self._kv, pages, slots)
            moves = self._host.finish_event()
        if plan.row_copies:
            copies = plan.row_copies
            sources, targets, rows = zip(*((copy.source, copy.target, copy.rows) for copy in copies), strict=True)
            self.model.ops.copy_rows(self._kv, sources, targets, rows)
        return moves

    def _encode(self, plan: StepPlan, timer: StepTimer) -> dict[ItemKey, PrismError]:
        """Drops and the encoder's work. Its time leaves out the copies before it: a swap-in may take longer."""
        if not plan.encode:
            return self.encoder.run(plan)
        timer.mark()
        failed = self.encoder.run(plan)
        timer.mark()
        return failed

    def _draw(self, plan: StepPlan, packed: _Packed) -> tuple[Tensor | None, PendingLogprobs | None]:
        """The language side: the plan's tokens int64 [D] and log-probabilities, on their way to the host."""
        if packed.layout is None:
            return None, None
        packet, output = self._slots.packet, self._language_step(plan, packed)
        num_draws = sum(rows.draw is not None for rows in plan.sequences)
        if output is None or num_draws == 0:
            return None, None
        tokens, logprobs = output.tokens[:num_draws], None
        if packed.sampling is not None:
            assert output.logits is not None, "a greedy step samples nothing"
            logits = output.logits[:num_draws]
            self._sampler.apply(packed.sampling, packet, logits, tokens, self._slots.last_tokens)
            logprobs = self._sampler.logprobs(packed.sampling, packet, logits, tokens)
        return to_host(tokens), logprobs

    def _language_step(self, plan: StepPlan, packed: _Packed) -> StepOutput | None:
        assert packed.layout is not None
        media = None
        if packed.media_rows is not None:
            media = self.encoder.feature_rows(plan.media, self._slots.packet.tensor(packed.media_rows))
        if packed.graph is not None:
            if media is not None:
                self._language.canvas(packed.graph.rows).draw(media)
            return self.graphs.replay(packed.graph)
        layout = packed.layout
        return self._language(self._slots.inputs(layout, plan.sequences), media, layout.size.greedy)


@lru_cache(maxsize=1024)
def layout_of(size: StepSize) -> StepLayout:
    """Layouts are made once: sizes come again and again."""
    return StepLayout(size)
