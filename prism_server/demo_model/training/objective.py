"""What is minimised: the loss of the answers, and, fading, of saying straight from the features what lies where.

Without the second one the model answers from the wording of the questions alone for a long time before it looks.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from prism_server.demo_model.drawing import COLORS, SHAPES
from prism_server.demo_model.pages import GLYPHS
from prism_server.demo_model.training.batches import Batch
from prism_server.demo_model.training.network import Output
from prism_server.demo_model.training.prompts import NOTHING_ASKED

HEADS = {"glyphs": len(GLYPHS), "colors": 1 + len(COLORS), "shapes": 1 + len(SHAPES)}
"""Linear maps from a token's feature to classes. Trained with the model, not part of a checkpoint."""
GLYPH_LOSS_SCALE = 8.0
"""Nearly all of the characters are absent from a cell, so the mean is small."""


def initial_heads(hidden_size: int, device: torch.device) -> dict[str, Tensor]:
    """A weight [classes, hidden_size] and a bias for each of `HEADS`, float32, all 0.

    From 0 they learn to read the features before they change them: random ones would spoil those of a trained model.
    """
    heads = {}
    for name, classes in HEADS.items():
        heads[f"{name}.weight"] = torch.zeros(classes, hidden_size, device=device)
        heads[f"{name}.bias"] = torch.zeros(classes, device=device)
    return heads


def answer_loss(batch: Batch, output: Output) -> Tensor:
    """Mean cross-entropy of the answers' tokens."""
    return F.cross_entropy(output.logits.flatten(0, 1).float(), batch.targets.flatten(), ignore_index=NOTHING_ASKED)


def cell_loss(batch: Batch, output: Output, heads: Mapping[str, Tensor]) -> Tensor:
    """Which characters have their middle in each token of a page, which colour and shape lies there in a scene."""
    if not batch.cells:
        return torch.zeros((), device=batch.ids.device)
    features = torch.cat([part.flatten(0, 1) for part in output.features])
    cells = torch.cat([part.flatten(0, 1) for part in batch.cells])

    def head(name: str) -> Tensor:
        return F.linear(features, heads[f"{name}.weight"], heads[f"{name}.bias"])

    if batch.layout.kind == "pages":
        return F.binary_cross_entropy_with_logits(head("glyphs"), cells.float()) * GLYPH_LOSS_SCALE
    return F.cross_entropy(head("colors"), cells[:, 0]) + F.cross_entropy(head("shapes"), cells[:, 1])
