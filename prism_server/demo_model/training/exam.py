"""Exact-match counts on conversations that training does not see."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from prism_server.demo_model.layouts import LAYOUTS, Layout
from prism_server.demo_model.training.batches import Asked, Batch, draw_batch
from prism_server.demo_model.training.network import Network
from prism_server.demo_model.training.prompts import PromptWriter


@dataclass(frozen=True, slots=True)
class Marks:
    """Right answers and questions, by task and by layout."""

    right: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)

    def add(self, layout: str, task: str, right: bool) -> None:
        for group in (layout, task):
            self.right[group] += right
            self.asked[group] += 1

    @property
    def num_asked(self) -> int:
        return sum(self.asked[layout.name] for layout in LAYOUTS)

    def share(self) -> float:
        """Of all questions: those answered rightly."""
        return sum(self.right[layout.name] for layout in LAYOUTS) / max(1, self.num_asked)

    def shares(self) -> dict[str, float]:
        return {name: round(self.right[name] / count, 4) for name, count in sorted(self.asked.items())}


class Exam:
    """A batch of each layout, asked as the generator asks, without the recipe's weights."""

    def __init__(
        self, writer: PromptWriter, layouts: Sequence[Layout], rows: int, seed: str, device: torch.device
    ) -> None:
        self._papers: list[tuple[Batch, Asked]] = []
        for layout in layouts:
            batch, asked = draw_batch(random.Random(f"{seed} {layout.name}"), writer, layout, rows, {})
            self._papers.append((batch.map(lambda tensor: tensor.to(device)), asked))

    @torch.no_grad()
    def mark(self, network: Network) -> Marks:
        """An answer is right when every token of it is the likeliest: just then greedy decoding gives that answer."""
        marks = Marks()
        for batch, asked in self._papers:
            hit = (network(batch).logits.argmax(-1) == batch.targets).cpu()
            for row, tasks in enumerate(asked.tasks):
                for number, task in enumerate(tasks):
                    right = bool(hit[row][asked.turn_of[row] == number].all())
                    marks.add(batch.layout.name, task, right)
        return marks
