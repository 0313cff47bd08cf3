"""What decides how a training goes, and the schedule that follows from it: the same over all commands of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace

from prism_server.demo_model.layouts import LAYOUT_BY_NAME, LAYOUTS, Layout
from prism_server.errors import StartupError

TASKS = (
    *("color", "shape", "count", "where", "yesno", "describe", "total"),
    *("number", "date", "customer", "seller", "quantity", "price", "lines", "has", "read", "json"),
    *("which", "media", "of", "find"),
    *("way", "what", "when", "second", "clip"),
    *("hello", "who", "sum", "repeat", "help"),
)
"""Every kind of question that the generator asks; `total` is of a scene and of a page."""

TASK_WEIGHTS: Mapping[str, float] = {"find": 3.0, "which": 3.0, "repeat": 3.0, "of": 2.0, "read": 2.0, "sum": 2.0}
"""How much more often than by the generator a kind is asked; 1 where nothing is said. What is learned last."""
LAYOUT_WEIGHTS: Mapping[str, float] = {"scenes-4": 8.0, "pages-2-mixed": 7.0, "pages-8": 8.0, "text": 3.0}
"""How often a layout is drawn, where not by its own weight."""

LEAST_LR_SHARE = 0.02
"""Of the peak, at the end."""
LEAST_AUX_SHARE = 0.05
"""Of the auxiliary weight, from the middle of the training on."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """One training. Its length is a number of steps or of minutes; with steps, equal recipes give equal rates.

    With neither it lasts until the first command's deadline, and `lasting` gives the recipe that says so.
    """

    peak_lr: float = 1.2e-3
    warmup_steps: int = 400
    aux_weight: float = 1.0
    total_steps: int | None = None
    total_minutes: float | None = None
    batch_tokens: int = 49152
    seed: int = 0
    task_weights: dict[str, float] = field(default_factory=lambda: dict(TASK_WEIGHTS))
    layout_weights: dict[str, float] = field(default_factory=lambda: dict(LAYOUT_WEIGHTS))
    start_from: str | None = None

    def __post_init__(self) -> None:
        if self.total_steps is not None and self.total_minutes is not None:
            raise StartupError("a training lasts a number of steps or a number of minutes, not both")
        lengths = [length for length in (self.total_steps, self.total_minutes) if length is not None]
        if not all(0 < length < math.inf for length in (*lengths, self.peak_lr)) or not 0 <= self.aux_weight < math.inf:
            raise StartupError("the length and the learning rate must be positive, the auxiliary weight not negative")
        if self.warmup_steps < 0 or self.batch_tokens < 1:
            raise StartupError("warmup_steps must not be negative and batch_tokens must be positive")
        _check_weights("task", self.task_weights, TASKS)
        _check_weights("layout", self.layout_weights, LAYOUT_BY_NAME)
        if not self.layouts():
            raise StartupError("every layout has weight 0")
        if not all(self.task_weights.values()):
            raise StartupError("a task's weight must be above 0")

    def weights_of_layouts(self) -> list[float]:
        """In the order of `LAYOUTS`; 0 leaves a layout out."""
        return [self.layout_weights.get(layout.name, layout.weight) for layout in LAYOUTS]

    def layouts(self) -> list[Layout]:
        """Those that are drawn at all."""
        return [layout for layout, weight in zip(LAYOUTS, self.weights_of_layouts(), strict=True) if weight]

    def progress(self, step: int, trained_seconds: float) -> float:
        """From 0 at the start to 1 at the end."""
        if self.total_steps is not None:
            return min(1.0, step / self.total_steps)
        if self.total_minutes is None:
            raise ValueError("the training's length is not known yet")
        return min(1.0, trained_seconds / (60 * self.total_minutes))

    def learning_rate(self, step: int, progress: float) -> float:
        """Rises over the first steps, then falls along half a cosine."""
        rise = min(1.0, (step + 1) / max(1, self.warmup_steps))
        fall = LEAST_LR_SHARE + (1 - LEAST_LR_SHARE) * (1 + math.cos(math.pi * progress)) / 2
        return self.peak_lr * rise * fall

    def auxiliary_weight(self, progress: float) -> float:
        """What the auxiliary losses count beside the answers': they lead at first and fade by half time."""
        return self.aux_weight * max(LEAST_AUX_SHARE, 1 - 2 * progress)

    def lasting(self, minutes: float) -> Recipe:
        """The same with this length, if it has none."""
        if self.total_steps is not None or self.total_minutes is not None:
            return self
        return replace(self, total_minutes=minutes)

    def as_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        return cls(**json.loads(text))


def _check_weights(what: str, weights: Mapping[str, float], known: tuple[str, ...] | Mapping[str, object]) -> None:
    for name, weight in weights.items():
        if name not in known:
            raise StartupError(f"unknown {what} {name!r}; known: {', '.join(known)}")
        if not 0 <= weight < math.inf:
            raise StartupError(f"the weight of {what} {name!r} must be a number of at least 0, not {weight}")
