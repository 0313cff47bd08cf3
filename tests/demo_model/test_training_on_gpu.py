"""Steps as CUDA graphs are the steps that the CPU takes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import write_tiny_template

from prism_server.demo_model import LAYOUT_BY_NAME
from prism_server.demo_model.training.batches import draw_batch
from prism_server.demo_model.training.learner import Learner, initial_weights
from prism_server.demo_model.training.prompts import PromptWriter
from prism_server.model.config import ModelConfig
from prism_server.model.loader import expected_shapes

pytestmark = pytest.mark.gpu


def make_learner(config: ModelConfig, device: str) -> Learner:
    weights = initial_weights(expected_shapes(config), torch.device(device), torch.Generator().manual_seed(0))
    return Learner(config, weights, dtype=torch.float32)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_replayed_steps_give_the_losses_and_weights_of_plain_ones(tmp_path: Path) -> None:
    """Layouts come more than once and with other batches, so that graphs are captured late and replayed."""
    directory = write_tiny_template(tmp_path)
    config = ModelConfig.from_dir(directory)
    writer, rng = PromptWriter(directory), random.Random(0)
    plain, replayed = make_learner(config, "cpu"), make_learner(config, "cuda")
    for name in (
        "text",
        "scenes-2-mixed",
        "page-224x288",
        "clip-4",
        "text",
        "scenes-2-mixed",
        "page-224x288",
        "clip-4",
    ):
        batch, _ = draw_batch(rng, writer, LAYOUT_BY_NAME[name], 3, {})
        for learner in (plain, replayed):
            learner.take_step(batch, learning_rate=1e-3, aux_weight=0.5)
        torch.testing.assert_close(replayed.losses.cpu(), plain.losses, rtol=1e-3, atol=1e-3)
    for expected, actual in zip(plain.averages(), replayed.averages(), strict=True):
        for name, average in expected.items():
            apart = (actual[name].cpu() - average).norm()
            assert apart <= 0.02 * average.norm() + 1e-5, name
