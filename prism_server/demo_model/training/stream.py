"""Batches without end, prepared by other processes.

Batch number n depends on the recipe and on n alone, so that a resumed run goes on with the same data, whatever the
number of workers.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

from torch.utils.data import DataLoader, Dataset

from prism_server.demo_model.layouts import LAYOUTS
from prism_server.demo_model.training.batches import Batch, draw_batch, num_rows
from prism_server.demo_model.training.prompts import PromptWriter
from prism_server.demo_model.training.recipe import Recipe

BATCHES_AHEAD = 4
"""That each worker prepares."""


class BatchStream(Dataset[Batch]):
    """Batch number n of a recipe, for any n."""

    def __init__(self, recipe: Recipe, directory: Path) -> None:
        self._recipe, self._directory = recipe, directory
        self._layout_weights = recipe.weights_of_layouts()
        self._writer: PromptWriter | None = None

    def __getitem__(self, number: int) -> Batch:
        if self._writer is None:  # each worker makes its own
            self._writer = PromptWriter(self._directory)
        rng = random.Random(f"{self._recipe.seed} batch {number}")
        (layout,) = rng.choices(LAYOUTS, self._layout_weights)
        rows = num_rows(layout, self._recipe.batch_tokens)
        return draw_batch(rng, self._writer, layout, rows, self._recipe.task_weights)[0]


def stream_batches(stream: BatchStream, first: int, num_workers: int, pin_memory: bool) -> Iterator[Batch]:
    """Batches from number `first` on, in order, prepared by `num_workers` processes (0: by this one, when asked)."""
    return iter(
        DataLoader(
            stream,
            batch_size=None,
            sampler=range(first, 1 << 62),
            num_workers=num_workers,
            prefetch_factor=BATCHES_AHEAD if num_workers else None,
            pin_memory=pin_memory,
            worker_init_fn=_start_worker,
        )
    )


def _start_worker(_: int) -> None:
    """The trainer alone decides when to stop: it saves first, and its workers end with it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
