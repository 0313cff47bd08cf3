"""Whole trainings of a tiny model on the CPU: it learns, a resumed run is the uninterrupted one, both can serve it."""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoint import write_tiny_template
from torch import Tensor
from transformers import Qwen3VLForConditionalGeneration

from prism_server.demo_model import LAYOUT_BY_NAME, LAYOUTS, checkpoint_dir
from prism_server.demo_model.training import train as training_loop
from prism_server.demo_model.training.batches import draw_batch
from prism_server.demo_model.training.cli import main
from prism_server.demo_model.training.exam import Exam
from prism_server.demo_model.training.network import Network
from prism_server.demo_model.training.prompts import PromptWriter
from prism_server.demo_model.training.recipe import Recipe
from prism_server.demo_model.training.state import Standing, read_standing
from prism_server.demo_model.training.train import Command, Trainer
from prism_server.errors import EngineFault
from prism_server.model import ModelConfig, Qwen3VL
from prism_server.model.loader import expected_shapes, load_tensors
from prism_server.ops.torch_ops import TorchOps

CPU = torch.device("cpu")
QUICK = ("text", "scene-64", "page-224x288")
RECIPE = Recipe(
    peak_lr=5e-3,
    warmup_steps=3,
    total_steps=30,
    batch_tokens=1200,
    layout_weights={layout.name: float(layout.name in QUICK) for layout in LAYOUTS},
)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_template(tmp_path_factory.mktemp("template"))


def trainer(directory: Path, template: Path, standing: Standing) -> Trainer:
    directory.mkdir(exist_ok=True)
    return Trainer(Command(directory, math.inf, CPU, num_workers=0, exam_rows=2), standing, template)


def train(directory: Path, template: Path, recipe: Recipe, stop_at: int | None = None) -> Trainer:
    """Goes on from what `directory` holds until the recipe's end, or until this many steps of the run are done."""
    made = trainer(directory, template, read_standing(directory) or Standing(recipe))
    made.run(lambda: made.standing.step == stop_at)
    return made


def log_of(directory: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (directory / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def test_thirty_steps_bring_the_losses_down(tmp_path: Path, template: Path) -> None:
    made = trainer(tmp_path, template, Standing(RECIPE))
    losses: list[Tensor] = []
    take_step = made.learner.take_step

    def remember(*arguments: object) -> None:
        take_step(*arguments)  # type: ignore[arg-type]
        losses.append(made.learner.losses.clone())

    made.learner.take_step = remember  # type: ignore[method-assign, assignment]
    assert made.run(lambda: False).progress == 1
    assert len(losses) == 30
    answers = torch.stack(losses)[:, 0]
    assert answers[:3].mean() > 6.5  # of 1,024 tokens none is known: log 1024 = 6.93
    assert answers[-5:].mean() < 0.8 * answers[:3].mean()
    before, after = log_of(tmp_path)
    assert (before["step"], after["step"]) == (0, 30)
    assert set(QUICK) | {"repeat", "color"} <= set(after["right"])  # type: ignore[call-overload]


def test_a_resumed_training_ends_as_the_uninterrupted_one(tmp_path: Path, template: Path) -> None:
    recipe = replace(RECIPE, total_steps=8)
    whole = train(tmp_path / "whole", template, recipe)
    train(tmp_path / "parts", template, recipe, stop_at=3)
    standing = read_standing(tmp_path / "parts")
    assert standing is not None
    assert standing.step == 3
    parts = train(tmp_path / "parts", tmp_path / "no template is needed any more", recipe)
    assert parts.standing.step == whole.standing.step == 8
    saved, expected = (load_file(tmp_path / name / "state.safetensors") for name in ("parts", "whole"))
    assert saved.keys() == expected.keys()
    assert any(name.startswith("weight.heads.") for name in saved)
    unequal = [name for name in saved if not torch.equal(saved[name], expected[name])]
    assert not unequal


def test_the_exported_checkpoint_is_served_by_both(tmp_path: Path, template: Path) -> None:
    made = train(tmp_path, template, replace(RECIPE, total_steps=2))
    directory = tmp_path / "checkpoint"
    bundled = {path.name for path in checkpoint_dir().iterdir() if "safetensors" not in path.name}
    assert bundled < {path.name for path in directory.iterdir()}
    config = ModelConfig.from_dir(directory)
    stored = load_tensors(directory, expected_shapes(config), CPU, torch.float32)
    for name, weight in made.learner.weights.items():
        assert torch.equal(stored[name], weight.detach().bfloat16().float())
    Qwen3VL.load(directory, CPU, torch.float32, TorchOps())
    reference, missing = Qwen3VLForConditionalGeneration.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not any(missing.values())
    batch, _ = draw_batch(random.Random(0), PromptWriter(directory), LAYOUT_BY_NAME["text"], 2, {})
    with torch.no_grad():
        expected = reference(input_ids=batch.ids, position_ids=batch.positions, use_cache=False).logits
        torch.testing.assert_close(Network(config, stored, torch.float32)(batch).logits, expected, rtol=1e-4, atol=1e-4)


def test_the_bundled_checkpoint_is_of_the_kind_that_is_exported_and_passes_the_exam(tmp_path: Path) -> None:
    """Shards and index by the same names and sizes; and its answers are right where nothing else is asked."""
    recipe = replace(RECIPE, total_steps=1, peak_lr=1e-9, start_from=str(checkpoint_dir()))
    made = trainer(tmp_path, checkpoint_dir(), Standing(recipe))
    layouts = [LAYOUT_BY_NAME[name] for name in ("text", "scene-160x96", "scenes-2", "pages-2", "clip-4")]
    made._exam = Exam(PromptWriter(checkpoint_dir()), layouts, 2, "test", CPU)
    made.run(lambda: True)
    exported = tmp_path / "checkpoint"
    assert sorted(path.name for path in exported.iterdir()) == sorted(path.name for path in checkpoint_dir().iterdir())
    for path in checkpoint_dir().glob("*.safetensors"):
        assert (exported / path.name).stat().st_size <= 16 << 20
    shapes = expected_shapes(ModelConfig.from_dir(exported))
    before, after = (load_tensors(place, shapes, CPU, torch.bfloat16) for place in (checkpoint_dir(), exported))
    assert all(torch.equal(before[name], after[name]) for name in shapes)
    _, entry = log_of(tmp_path)
    assert float(str(entry["right_of_all"])) > 0.85


def test_a_loss_that_is_no_number_ends_the_training_and_keeps_the_saved_state(tmp_path: Path, template: Path) -> None:
    train(tmp_path, template, RECIPE, stop_at=2)
    standing = read_standing(tmp_path)
    assert standing is not None
    made = trainer(tmp_path, template, standing)
    with torch.no_grad():
        made.learner.heads["glyphs.bias"].fill_(math.nan)
        made.learner.weights["model.language_model.norm.weight"].fill_(math.nan)
    with pytest.raises(EngineFault, match="not a number"):
        made.run(lambda: made.standing.step == 3)
    assert read_standing(tmp_path) == standing


def only_quick() -> list[str]:
    return [f"--layout={name}={weight:g}" for name, weight in RECIPE.layout_weights.items()]


def run_cli(*options: str) -> subprocess.Popen[str]:
    script = "import sys; from prism_server.demo_model.training.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-u", "-c", script, "--device", "cpu", "--exam-rows", "2", *options],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_sigterm_to_trainer_and_workers_saves_and_the_run_can_be_resumed(tmp_path: Path, template: Path) -> None:
    options = ["--out", str(tmp_path / "run"), "--template", str(template), "--workers", "2", "--report-seconds", "0.2"]
    process = run_cli(*options, *only_quick(), "--total-steps", "100000", "--batch-tokens", "800", "--minutes", "4")
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 0, ")
    assert process.stdout.readline().startswith("step ")
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    assert "--resume goes on" in output
    standing = read_standing(tmp_path / "run")
    assert standing is not None
    assert standing.step == log_of(tmp_path / "run")[-1]["step"] > 0  # type: ignore[operator]
    assert (tmp_path / "run" / "checkpoint" / "model.safetensors").is_file()
    assert main(options) == 2  # it must be said that the run is to go on


def test_steps_end_at_the_deadline_and_a_training_without_a_length_ends_with_them(
    tmp_path: Path, template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that goes on by a second whenever it is read: a step reads it three times."""
    seconds = itertools.count(1000.0)
    monkeypatch.setattr(training_loop, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    recipe = replace(RECIPE, total_steps=None)
    command = Command(tmp_path, 1060.0, CPU, num_workers=0, exam_rows=1)
    standing = Trainer(command, Standing(recipe), template).run(lambda: False)
    assert 10 < standing.step < 20
    assert standing.recipe.total_minutes is not None
    assert 0.8 < standing.recipe.total_minutes <= 1
    assert read_standing(tmp_path) == standing
    late = Trainer(replace(command, deadline=0.0), standing, template).run(lambda: False)
    assert late.step == standing.step


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--minutes", "0"], "--minutes must be positive"),
        (["--task", "find"], "not NAME=WEIGHT"),
        (["--task", "fnid=2"], "unknown task 'fnid'"),
        (["--device", "tpu"], "cuda or cpu"),
        (["--resume", "--lr", "0.5"], "the training began with peak_lr 0.001"),
    ],
)
def test_a_wrong_option_is_one_line(
    tmp_path: Path, template: Path, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if "--resume" in options:
        train(tmp_path, template, Recipe(total_steps=5, peak_lr=1e-3, batch_tokens=800), stop_at=1)
    assert main(["--out", str(tmp_path), "--template", str(template), *options]) == 2
    error = capsys.readouterr().err
    assert reason in error
    assert error.count("\n") == 1
