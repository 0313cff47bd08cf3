"""`prism-train-demo`: train the demo model on one GPU, in commands as short as one likes."""

from __future__ import annotations

import argparse
import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prism_server.cli_support import ArgumentParser, console_script
from prism_server.demo_model import checkpoint_dir
from prism_server.demo_model.training.recipe import LAYOUT_WEIGHTS, TASK_WEIGHTS, Recipe
from prism_server.errors import EngineFault, StartupError

FAILED_EXIT_CODE = 1
CLOSING_SECONDS = 15.0
"""For the last save, the export and the last exam."""
WARM_START = {"peak_lr": 4e-4, "warmup_steps": 100, "aux_weight": 0.1}
"""Where a recipe that starts from a trained model differs: it has something to lose."""

EPILOG = """examples:
  prism-train-demo --out DIR --minutes 8 --total-minutes 40 --resume   run it five times: a model from nothing
  prism-train-demo --out DIR --minutes 8 --start-from CHECKPOINT       eight minutes on top of a trained model
  prism-train-demo --out DIR --minutes 8 --task find=5                 ask one kind of question more often

DIR gets state.safetensors (to go on from), log.jsonl, and checkpoint/, a Qwen3-VL directory to serve. What is said
about the training itself holds for all commands of a run: repeat it or leave it out. SIGTERM and Ctrl-C save, too.
exit code: 0; 1 when the loss is no number any more; 2 when an argument is wrong"""


@console_script("prism-train-demo")
def main(argv: Sequence[str]) -> int:
    started = time.monotonic()
    arguments = build_parser().parse_strictly(argv)
    if not 0 < arguments.minutes < math.inf:
        raise StartupError(f"--minutes must be positive, not {arguments.minutes}")
    # With torch: --help and a wrong option need not wait for it.
    from prism_server.demo_model.training.state import Standing, read_standing
    from prism_server.demo_model.training.train import Command, Trainer

    standing = read_standing(arguments.out)
    if standing is not None and not arguments.resume:
        raise StartupError(f"{arguments.out} holds a training; --resume goes on with it")
    given = _given_recipe(arguments)
    if standing is None:
        standing = Standing(new_recipe(given))
    else:
        _check_same(given, standing.recipe)
    limit_seconds = 60 * arguments.minutes
    command = Command(
        directory=arguments.out,
        deadline=started + max(limit_seconds - CLOSING_SECONDS, limit_seconds / 2),
        device=_device(arguments.device),
        num_workers=arguments.workers,
        report_seconds=arguments.report_seconds,
        exam_rows=arguments.exam_rows,
    )
    stopped = _stop_on_signals()
    try:
        standing = Trainer(command, standing, arguments.template).run(stopped)
    except EngineFault as fault:
        print(f"prism-train-demo: {fault.reason}")
        return FAILED_EXIT_CODE
    finished = "complete" if standing.progress >= 1 else f"{standing.progress:.0%} done; --resume goes on"
    print(f"{finished}: step {standing.step}, {arguments.out / 'checkpoint'}")
    return 0


def build_parser() -> ArgumentParser:
    parser = ArgumentParser("prism-train-demo", "Train the demo model.", EPILOG)
    add = parser.add_argument
    add("--out", type=Path, required=True, metavar="DIR", help="the run's directory")
    add("--minutes", type=float, default=8.0, help="of this command, start and saving included (default: %(default)g)")
    add("--resume", action="store_true", help="go on with the training in DIR; begin one if there is none")
    add("--template", type=Path, default=checkpoint_dir(), metavar="DIR", help="configuration and tokenizer (bundled)")
    add("--device", default=None, help="cuda or cpu (default: cuda where there is one)")
    add("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="that draw data (default: %(default)s)")
    add(
        "--report-seconds",
        type=float,
        default=60.0,
        metavar="S",
        help="between reports, with a save each (default: 60)",
    )
    add("--exam-rows", type=int, default=32, metavar="N", help="unseen conversations a layout (default: %(default)s)")
    recipe = parser.add_argument_group("the training, the same for all commands of a run").add_argument
    recipe("--start-from", type=_absolute, metavar="CHECKPOINT", help="begin with its weights, not with random ones")
    recipe("--total-minutes", type=float, help="length of the whole training (default: this command's)")
    recipe("--total-steps", type=int, help="the same in steps")
    recipe(
        "--lr", dest="peak_lr", type=float, help=f"peak (default: 1.2e-3; from a checkpoint {WARM_START['peak_lr']:g})"
    )
    recipe("--warmup-steps", type=int, help="in which the rate rises (default: 400; from a checkpoint 100)")
    recipe("--aux-weight", type=float, help="of the auxiliary losses at first (default: 1; from a checkpoint 0.1)")
    recipe("--batch-tokens", type=int, help="rows times length of a batch (default: 49152)")
    recipe("--seed", type=int, help="of the weights and the data (default: 0)")
    recipe("--task", action="append", type=_weight, metavar="NAME=W", help=f"how often asked ({_list(TASK_WEIGHTS)})")
    recipe(
        "--layout", action="append", type=_weight, metavar="NAME=W", help=f"how often drawn ({_list(LAYOUT_WEIGHTS)})"
    )
    return parser


def new_recipe(given: dict[str, Any]) -> Recipe:
    """The recipe of a run that begins: what was said, and defaults that depend on what it starts from."""
    weights = {
        "task_weights": {**TASK_WEIGHTS, **given.get("task_weights", {})},
        "layout_weights": {**LAYOUT_WEIGHTS, **given.get("layout_weights", {})},
    }
    return Recipe(**{**(WARM_START if given.get("start_from") else {}), **given, **weights})


def _given_recipe(arguments: argparse.Namespace) -> dict[str, Any]:
    names = (
        "start_from",
        "total_minutes",
        "total_steps",
        "peak_lr",
        "warmup_steps",
        "aux_weight",
        "batch_tokens",
        "seed",
    )
    given = {name: getattr(arguments, name) for name in names if getattr(arguments, name) is not None}
    for name, weights in (("task_weights", arguments.task), ("layout_weights", arguments.layout)):
        if weights:
            given[name] = dict(weights)
    return given


def _check_same(given: dict[str, Any], recipe: Recipe) -> None:
    """StartupError when a resumed run is told otherwise than it began."""
    for name, value in given.items():
        kept = getattr(recipe, name)
        same = value.items() <= kept.items() if isinstance(value, dict) else value == kept
        if not same:
            raise StartupError(f"the training began with {name} {kept}, not {value}; leave the option out to go on")


def _stop_on_signals() -> Callable[[], bool]:
    """SIGTERM and Ctrl-C end the training after the step under way; the answer tells whether one came."""
    event = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: event.set())
    return event.is_set


def _device(name: str | None) -> Any:
    import torch

    if name not in (None, "cpu", "cuda"):
        raise StartupError(f"--device is cuda or cpu, not {name!r}")
    if name == "cuda" and not torch.cuda.is_available():
        raise StartupError("there is no CUDA GPU here")
    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))


def _absolute(text: str) -> str:
    return str(Path(text).absolute())


def _weight(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=WEIGHT") from None


def _list(weights: Any) -> str:
    return ", ".join(f"{name}={weight:g}" for name, weight in weights.items())
