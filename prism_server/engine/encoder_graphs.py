"""The vision tower's blocks as CUDA graphs, by the number of patches that a batch is padded to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from prism_server.engine.cost_model import MAX_STEP_PATCHES
from prism_server.engine.graphs import recording
from prism_server.model.vision import VisionState, VisionTower
from prism_server.model.vision_canvas import CanvasWindow, PaddedBlocks

logger = logging.getLogger(__name__)

PATCHES = (256, 512, 1024, 1536, 2048, 3072, 4096, 5120, 6400, 8192, 10_240, 12_800, MAX_STEP_PATCHES)
"""Sizes of graphs, up to what a step encodes. Finer than doubling: every patch of padding costs its time."""
MAX_SEGMENT_PATCHES = 4096
"""Larger frames are left to torch's own attention: most of their time is attention's, and far beyond the launches'."""
MAX_PADDING = 2
"""For its many frames a batch takes a size so many times the one that its patches would need, at most."""
RUNS = 3
"""Graphs that the whole tower is replayed as. Blocks that do not make up such a run have graphs of their own."""

Span = tuple[int, int]
"""Blocks: the first, and the first no more."""
Batch = tuple[list[VisionState], PaddedBlocks | None]
"""Items that go through the tower together, and how; None: exactly, and without a graph."""


class EncoderGraphs:
    """What batches of the encoder are run by. Without any, all of them are exact and eager."""

    def __init__(self, sizes: Sequence[PaddedBlocks] = (), num_graphs: int = 0) -> None:
        self._ascending = sorted(sizes, key=lambda size: size.window.num_patches)
        self._num_graphs = num_graphs

    @classmethod
    def twin(cls, tower: VisionTower, sizes: Sequence[int]) -> EncoderGraphs:
        """What graphs of these sizes would do, launch by launch: for tests, where there is no GPU."""
        canvas = tower.canvas(max(sizes))
        windows = [canvas.window(size) for size in sizes]
        return cls([PaddedBlocks(canvas, window, partial(tower.run_padded, window)) for window in windows])

    def __len__(self) -> int:
        """CUDA graphs in all."""
        return self._num_graphs

    @property
    def sizes(self) -> tuple[int, ...]:
        """Patches, smallest first."""
        return tuple(size.window.num_patches for size in self._ascending)

    def batches(self, states: Sequence[VisionState]) -> list[Batch]:
        """Items at the same block, as many together as there is room for; those that no size has room for are one."""
        exact: list[VisionState] = []
        batches: list[Batch] = []
        for state in states:
            together = [*batches[-1][0], state] if batches else [state]
            if (size := self._size_or_none(together)) is not None:
                batches[-1:] = [(together, size)]
            elif (size := self._size_or_none([state])) is not None:
                batches.append(([state], size))
            else:
                exact.append(state)
        return [*batches, (exact, None)] if exact else batches

    def _size_or_none(self, states: Sequence[VisionState]) -> PaddedBlocks | None:
        """The smallest that has room for them; none where their many small frames need one more than MAX_PADDING times
        as large as their patches do."""
        if any(state.segment_patches > MAX_SEGMENT_PATCHES for state in states):
            return None
        patches = sum(state.num_patches for state in states)
        segments = sum(state.num_segments for state in states)
        roomy = [size for size in self._ascending if size.window.num_patches >= patches]
        for size in roomy:
            if size.window.max_segments >= segments:
                return size if size.window.num_patches <= MAX_PADDING * roomy[0].window.num_patches else None
        return None


def spans(first: int, last: int, depth: int) -> Iterator[Span]:
    """Blocks [first, last) of a tower of `depth`, cut into those that graphs are made of."""
    run = -(-depth // RUNS)
    while first < last:
        end = min(first + run, depth)
        if first % run or end > last:
            end = first + 1
        yield first, end
        first = end


def all_spans(depth: int) -> list[Span]:
    """Every one that `spans` gives."""
    return sorted({*spans(0, depth, depth), *pairwise(range(depth + 1))})


class _Replays:
    """The graphs of one size. A replay keeps the interpreter's lock away from this thread once, a launch each time."""

    def __init__(self, graphs: Mapping[Span, torch.cuda.CUDAGraph], depth: int) -> None:
        self._graphs, self._depth = graphs, depth

    def __call__(self, first: int, last: int) -> None:
        for span in spans(first, last, self._depth):
            self._graphs[span].replay()


@torch.inference_mode()
def capture_encoder(
    tower: VisionTower, sizes: Sequence[int], stream: torch.cuda.Stream, on_captured: Callable[[int], None]
) -> EncoderGraphs:
    """Capture the blocks for each number of patches, in this order, largest first; what does not fit is left out.

    All of them work on one canvas and share one pool for what they make on the way: a step runs one after the other.
    """
    captured: list[PaddedBlocks] = []
    num_graphs, pool = 0, torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.stream(stream):
            canvas = tower.canvas(max(sizes, default=0))
    except torch.OutOfMemoryError as error:
        logger.warning("no graphs for the encoder: %s", str(error).splitlines()[0])
        return EncoderGraphs()
    for number, size in enumerate(sizes, 1):
        window = canvas.window(size)
        try:
            graphs = _capture(tower, window, stream, pool)
        except torch.OutOfMemoryError as error:
            logger.warning("no graphs for %d patches: %s", size, str(error).splitlines()[0])
        else:
            captured.append(PaddedBlocks(canvas, window, _Replays(graphs, tower.config.depth)))
            num_graphs += len(graphs)
        on_captured(number)
    return EncoderGraphs(captured, num_graphs)


def _capture(
    tower: VisionTower, window: CanvasWindow, stream: torch.cuda.Stream, pool: Any
) -> dict[Span, torch.cuda.CUDAGraph]:
    """Every span's graph. The blocks are run once before: kernels are compiled and libraries make their workspaces."""
    depth = tower.config.depth
    with torch.cuda.stream(stream):
        tower.run_padded(window, 0, depth)
    graphs = {}
    for span in all_spans(depth):
        graphs[span] = graph = torch.cuda.CUDAGraph()
        with recording(graph, pool, stream):
            tower.run_padded(window, *span)
    return graphs
