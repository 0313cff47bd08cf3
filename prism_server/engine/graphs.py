"""Captured steps: one family of CUDA graphs for decodes, suffixes, chunks and their mixtures, by the step's size."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch import Tensor

from prism_server.engine.language import StepOutput
from prism_server.engine.step_inputs import StepSize
from prism_server.ops.fp8_head import MAX_FASTER_ROWS

logger = logging.getLogger(__name__)

S = TypeVar("S")
G = TypeVar("G")

DECODES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Sequences of the graphs for decodes alone. Up to some hundred rows a step's time is that of reading the weights, and
rows of padding are nearly free."""
MIXED_ROWS = (16, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 1024, 1280, 1536)
"""Rows of the graphs for everything else: finer than doubling, because from some 150 rows on each costs its time."""
MEDIA_ROWS = (128, 256, 384, 512, 640, 768, 1024, 1280, 1536)
"""Rows of the graphs for chunks that show media: what beside decodes fits into a step's time. Without graphs such a
step would take as long as its some 400 launches take the host, however short it is."""
FEW_SEQUENCES = (4, 16)
"""Mixtures of few rows also have graphs for few sequences: a draw costs a row of the head and of logits."""
FEW_ROWS = 128

Replay = Callable[[], StepOutput]


def family_sizes(max_rows: int, max_sequences: int, fp8_head: bool = False) -> list[StepSize]:
    """Sizes worth a graph, largest first: every step of at most `max_rows` rows fits into one of them.

    With an FP8 head, decodes alone have a graph for each way to find their tokens. Other steps take the head itself:
    what the copy saves is a small part of their time.
    """
    decodes = [n for n in DECODES if n < max_sequences] + [max_sequences]
    sizes = {StepSize(n, n, n, each_row_draws=True) for n in decodes if n <= max_rows}
    if fp8_head:
        most = min(max_rows, MAX_FASTER_ROWS)
        sizes |= {StepSize(n, n, n, each_row_draws=True, greedy=True) for n in decodes if n <= most}
    for rows in [n for n in MIXED_ROWS if n < max_rows] + [max_rows]:
        few = FEW_SEQUENCES if rows <= FEW_ROWS else ()
        for sequences in {min(n, rows, max_sequences) for n in (*few, max_sequences)}:
            sizes.add(StepSize(rows, sequences, sequences))
    for rows in [n for n in MEDIA_ROWS if n <= max_rows]:
        sizes.add(StepSize(rows, min(rows, max_sequences), min(rows, max_sequences), media=True))
    return sorted(sizes, reverse=True)


class GraphFamily:
    """The graphs there are. A replay runs the step whose packet was sent last, padded to the graph's size."""

    def __init__(self, replays: Mapping[StepSize, Replay]) -> None:
        self._replays = dict(replays)
        self._ascending = sorted(
            self._replays, key=lambda size: (size.rows, size.sequences, not size.each_row_draws, not size.greedy)
        )

    def __len__(self) -> int:
        return len(self._replays)

    @property
    def sizes(self) -> tuple[StepSize, ...]:
        """Smallest first."""
        return tuple(self._ascending)

    @property
    def max_rows(self) -> int:
        """Any step of up to so many rows has a graph, if it has no more sequences than the graphs are made for."""
        most = [max((size.rows for size in self._replays if size.media == media), default=0) for media in (False, True)]
        return min(most)

    def size_or_none(self, wanted: StepSize) -> StepSize | None:
        """The smallest graph that a step fits into."""
        for size in self._ascending:
            if (
                size.media == wanted.media
                and size.rows >= wanted.rows
                and size.sequences >= wanted.sequences
                and (wanted.each_row_draws or not size.each_row_draws)
                and (wanted.greedy or not size.greedy)
            ):
                return size
        return None

    def replay(self, size: StepSize) -> StepOutput:
        return self._replays[size]()


def capture_within(
    sizes: Sequence[S],
    capture: Callable[[Sequence[S]], G],
    free_bytes: Callable[[], int],
    needed_bytes: int,
    rows_of: Callable[[S], int] = attrgetter("rows"),
) -> G:
    """`capture` of as many sizes as leave `needed_bytes` free: while they do not, those of most rows are left out.

    Graphs of one pool give its memory back only together, so each try starts afresh.
    """
    left = list(sizes)
    while True:
        graphs = capture(left)
        if not left or (free := free_bytes()) >= needed_bytes:
            return graphs
        most_rows = max(map(rows_of, left))
        text = "no graph for %d rows and more: with it %d bytes are free, %d are needed"
        logger.warning(text, most_rows, free, needed_bytes)
        del graphs
        left = [size for size in left if rows_of(size) < most_rows]


class CapturedStep:
    """A CUDA graph and where its output lies."""

    def __init__(self, graph: torch.cuda.CUDAGraph, output: StepOutput) -> None:
        self._graph, self._output = graph, output

    def __call__(self) -> StepOutput:
        self._graph.replay()
        return self._output


def capture_family(
    sizes: Sequence[StepSize],
    load_empty: Callable[[StepSize], None],
    run: Callable[[StepSize], StepOutput],
    stream: torch.cuda.Stream,
    on_captured: Callable[[int], None],
) -> GraphFamily:
    """Capture `run` for each size, in this order, into one pool of memory; what does not fit is left out.

    `load_empty` sends a packet of nothing but padding, on which `run` is run once before (kernels are compiled and
    libraries make their workspaces then, not while the stream is being recorded). Largest first: the smaller ones find
    room in what the larger ones left.
    """
    pool = torch.cuda.graph_pool_handle()
    replays: dict[StepSize, Replay] = {}
    for number, size in enumerate(sizes, 1):
        try:
            replays[size] = _capture(size, load_empty, run, stream, pool)
        except torch.OutOfMemoryError as error:
            reason = str(error).splitlines()[0]
            logger.warning("no graph for %d rows of %d sequences: %s", size.rows, size.sequences, reason)
        on_captured(number)
    return GraphFamily(replays)


def _capture(
    size: StepSize,
    load_empty: Callable[[StepSize], None],
    run: Callable[[StepSize], StepOutput],
    stream: torch.cuda.Stream,
    pool: Any,
) -> Replay:
    with torch.cuda.stream(stream):
        load_empty(size)
        run(size)
    graph = torch.cuda.CUDAGraph()
    with recording(graph, pool, stream):
        output = run(size)
    logits = None if output.logits is None else _window(output.logits)
    return CapturedStep(graph, StepOutput(logits, output.tokens))


def recording(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
    """What is launched inside goes into the graph, and what it makes into the pool.

    Other threads (media, HTTP) may call the driver meanwhile: only this one's calls are restricted.
    """
    capture: AbstractContextManager[None] = torch.cuda.graph(
        graph, pool=pool, stream=stream, capture_error_mode="thread_local"
    )
    return capture


class _Memory:
    """Somebody's device memory, without keeping it."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def _window(tensor: Tensor) -> Tensor:
    """The same memory, which stays free for the next capture in the pool: only one graph runs at a time, and what it
    left is read before the next one starts. Logits would otherwise take a row of the vocabulary for every draw of every
    graph."""
    window = torch.as_tensor(_Memory(tensor), device=tensor.device)
    assert window.data_ptr() == tensor.data_ptr(), "a window is no copy"
    return window
