"""The two things that a run leaves in its directory: a state to go on from, and a checkpoint to serve.

`state.safetensors` holds the float32 weights, the auxiliary heads and both averages of the optimiser for each of them,
with the step, the seconds trained and the recipe as metadata. The data need no state: batch n is drawn from n.
`checkpoint/` has the files of the checkpoint that the run began with, and bfloat16 weights.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from prism_server.demo_model.training.learner import Learner
from prism_server.demo_model.training.recipe import Recipe
from prism_server.errors import StartupError
from prism_server.model.loader import INDEX_NAME, Tensors

STATE_NAME, CHECKPOINT_NAME = "state.safetensors", "checkpoint"
SHARD_BYTES = 12_000_000


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a run has come."""

    recipe: Recipe
    step: int = 0
    trained_seconds: float = 0.0

    @property
    def progress(self) -> float:
        return self.recipe.progress(self.step, self.trained_seconds)


def read_standing(directory: Path) -> Standing | None:
    """None when no state was saved there. StartupError for a file that is no state."""
    path = directory / STATE_NAME
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            facts = file.metadata() or {}
        return Standing(Recipe.from_json(facts["recipe"]), int(facts["step"]), float(facts["trained_seconds"]))
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise StartupError(f"{path} is not a state of the trainer: {error}") from error


def save_state(directory: Path, learner: Learner, standing: Standing) -> None:
    """Replaces the state in one go: a run that is killed meanwhile keeps the old one."""
    facts = {
        "recipe": standing.recipe.as_json(),
        "step": str(standing.step),
        "trained_seconds": str(standing.trained_seconds),
    }
    tensors = {name: tensor.detach().contiguous() for name, tensor in _state_tensors(learner).items()}
    unfinished = directory / f"{STATE_NAME}.tmp"
    save_file(tensors, unfinished, metadata=facts)
    unfinished.replace(directory / STATE_NAME)


def load_state(directory: Path, learner: Learner, step: int) -> None:
    """Into the learner's own tensors. StartupError when the state is of another model."""
    path = directory / STATE_NAME
    with torch.no_grad(), safe_open(path, framework="pt") as file:
        own = _state_tensors(learner)
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        if shapes != {name: tuple(tensor.shape) for name, tensor in own.items()}:
            raise StartupError(f"{path} is of a model of another shape than {directory / CHECKPOINT_NAME}/config.json")
        for name, tensor in own.items():
            tensor.copy_(file.get_tensor(name))
    learner.set_num_steps(step)


def copy_template(template: Path, checkpoint: Path) -> None:
    """All files of a checkpoint but the weights: configuration, tokenizer, chat template, preprocessing."""
    checkpoint.mkdir(parents=True, exist_ok=True)
    for path in template.iterdir():
        if path.is_file() and path.suffix != ".safetensors" and path.name != INDEX_NAME:
            shutil.copyfile(path, checkpoint / path.name)


def export_checkpoint(directory: Path, weights: Mapping[str, Tensor]) -> Path:
    """`directory`/checkpoint with these weights in bfloat16, in shards as the bundled one; the old one is replaced."""
    checkpoint = directory / CHECKPOINT_NAME
    unfinished, old = directory / f"{CHECKPOINT_NAME}.tmp", directory / f"{CHECKPOINT_NAME}.old"
    shutil.rmtree(unfinished, ignore_errors=True)
    copy_template(checkpoint, unfinished)
    rounded = {name: weight.detach().to("cpu", torch.bfloat16) for name, weight in weights.items()}
    save_torch_state_dict(rounded, unfinished, max_shard_size=SHARD_BYTES, metadata={"format": "pt"})
    for shard in unfinished.glob("*.safetensors"):
        shard.chmod(0o644)  # the library writes for the owner alone; a server may run as somebody else
    shutil.rmtree(old, ignore_errors=True)
    checkpoint.rename(old)
    unfinished.rename(checkpoint)
    shutil.rmtree(old)
    return checkpoint


def _state_tensors(learner: Learner) -> Tensors:
    averages, squares = learner.averages()
    return {
        **{f"weight.{name}": tensor for name, tensor in learner.named_parameters().items()},
        **{f"average.{name}": tensor for name, tensor in averages.items()},
        **{f"square.{name}": tensor for name, tensor in squares.items()},
    }
