"""One command's part of a training: set up or resume, take steps until the time is up, save."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prism_server.demo_model.training.batches import Batch
from prism_server.demo_model.training.exam import Exam, Marks
from prism_server.demo_model.training.learner import Learner, initial_weights
from prism_server.demo_model.training.prompts import PromptWriter
from prism_server.demo_model.training.recipe import Recipe
from prism_server.demo_model.training.state import (
    CHECKPOINT_NAME,
    Standing,
    copy_template,
    export_checkpoint,
    load_state,
    save_state,
)
from prism_server.demo_model.training.stream import BatchStream, stream_batches
from prism_server.errors import EngineFault
from prism_server.model.config import ModelConfig
from prism_server.model.loader import Tensors, expected_shapes, load_tensors

LOG_NAME = "log.jsonl"
STEPS_AHEAD = 16
"""That may wait in the GPU's queue: more of them would be done after the time is up."""
TASKS_SHOWN = ("find", "which", "of", "read", "repeat", "price", "count")
"""In the line of each report, the ones learned last; the log has all."""


@dataclass(frozen=True, slots=True)
class Command:
    """What is said anew with each command. `deadline`, a time of `time.monotonic`, is that of the last step."""

    directory: Path
    deadline: float
    device: torch.device
    num_workers: int
    report_seconds: float = 60.0
    exam_rows: int = 32


class Trainer:
    """Owns the learner and the run's directory."""

    def __init__(self, command: Command, standing: Standing, template: Path) -> None:
        """Begins with the files of `template` if no step is done yet, else goes on from the directory.

        StartupError: files are missing or do not fit.
        """
        self._command = command
        self.standing = standing
        self._checkpoint = command.directory / CHECKPOINT_NAME
        if standing.step == 0:
            copy_template(template, self._checkpoint)
        on_gpu, recipe = command.device.type == "cuda", standing.recipe
        # Before all else, so that workers prepare batches while the rest is set up.
        stream = BatchStream(recipe, self._checkpoint)
        self._batches = stream_batches(stream, standing.step, command.num_workers, pin_memory=on_gpu)
        config = ModelConfig.from_dir(self._checkpoint)
        weights = _first_weights(config, recipe, command.device)
        self.learner = Learner(config, weights, torch.bfloat16 if on_gpu else torch.float32)
        if standing.step:
            load_state(command.directory, self.learner, standing.step)
        self._exam = Exam(PromptWriter(self._checkpoint), recipe.layouts(), command.exam_rows, "exam", command.device)
        self._tally = Tally(command.device)
        self._started = time.monotonic()

    def run(self, stopped: Callable[[], bool]) -> Standing:
        """Steps until the training is complete, the deadline is there or `stopped`; saves and exports in every case.

        EngineFault when the loss is no number any more; the last saved state stays.
        """
        command = self._command
        recipe = self.standing.recipe.lasting(max(1.0, command.deadline - time.monotonic()) / 60)
        self.standing = replace(self.standing, recipe=recipe)
        self._report()  # what this command begins with, to compare with
        reported = before = time.monotonic()
        while self.standing.progress < 1 and before < command.deadline and not stopped():
            self._take_step()
            now = time.monotonic()
            trained_seconds = self.standing.trained_seconds + now - before
            self.standing = replace(self.standing, step=self.standing.step + 1, trained_seconds=trained_seconds)
            if now - reported >= command.report_seconds:
                self._save()
                self._report()
                now = reported = time.monotonic()
            before = now
        self._batches = iter(())  # its workers end
        self._save()
        export_checkpoint(command.directory, self.learner.weights)
        self._report()
        return self.standing

    def _take_step(self) -> None:
        standing = self.standing
        started = time.monotonic()
        batch = next(self._batches)
        self._tally.waited_seconds += time.monotonic() - started
        rate = standing.recipe.learning_rate(standing.step, standing.progress)
        self.learner.take_step(batch, rate, standing.recipe.auxiliary_weight(standing.progress))
        self._tally.add(batch, self.learner.losses)
        if standing.step % STEPS_AHEAD == 0:
            self._check_loss()

    def _check_loss(self) -> None:
        """Waits for the GPU."""
        if not bool(self.learner.losses.isfinite().all()):
            raise EngineFault(f"the loss is not a number at step {self.standing.step}; --resume goes back to the save")

    def _save(self) -> None:
        self._check_loss()
        save_state(self._command.directory, self.learner, self.standing)

    def _report(self) -> None:
        """A line for a person, and one in the log."""
        marks = self._exam.mark(self.learner.network)
        facts = self._facts(marks)
        with (self._command.directory / LOG_NAME).open("a", encoding="utf-8") as log:
            log.write(json.dumps(facts) + "\n")
        losses = " ".join(f"{kind} {answers:.3f}/{cells:.3f}" for kind, (answers, cells) in facts["losses"].items())
        tasks = " ".join(f"{task} {facts['right'][task]:.3f}" for task in TASKS_SHOWN if task in facts["right"])
        print(
            f"step {facts['step']}, {facts['progress']:.0%} done, {facts['seconds']:.0f} s, waiting for data "
            f"{facts['waited']:.0%}; loss {losses or '-'}; right {marks.share():.4f} of {marks.num_asked}: {tasks}",
            flush=True,
        )
        self._tally = Tally(self._command.device)

    def _facts(self, marks: Marks) -> dict[str, Any]:
        standing, tally = self.standing, self._tally
        return {
            "step": standing.step,
            "progress": round(standing.progress, 4),
            "seconds": round(time.monotonic() - self._started, 1),
            "waited": round(tally.waited_seconds / max(1e-9, time.monotonic() - tally.started), 3),
            "losses": tally.means(),
            "right_of_all": round(marks.share(), 4),
            "right": marks.shares(),
        }


class Tally:
    """Losses since the last report, summed where they are made so that no step waits for them."""

    def __init__(self, device: torch.device) -> None:
        self.started = time.monotonic()
        self.waited_seconds = 0.0
        self._device = device
        self._counts: Counter[str] = Counter()
        self._sums: dict[str, Tensor] = {}

    def add(self, batch: Batch, losses: Tensor) -> None:
        kind = batch.layout.kind
        self._counts[kind] += 1
        self._sums[kind] = self._sums.get(kind, torch.zeros(2, device=self._device)) + losses

    def means(self) -> dict[str, list[float]]:
        """Of each kind of layout: the answers' loss and the auxiliary one."""
        return {
            kind: [round(value / self._counts[kind], 4) for value in total.tolist()]
            for kind, total in sorted(self._sums.items())
        }


def _first_weights(config: ModelConfig, recipe: Recipe, device: torch.device) -> Tensors:
    shapes = expected_shapes(config)
    if recipe.start_from is None:
        return initial_weights(shapes, device, torch.Generator().manual_seed(recipe.seed))
    return load_tensors(Path(recipe.start_from), shapes, device, torch.float32)
