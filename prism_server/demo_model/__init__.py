"""The bundled demo model: a small trained Qwen3-VL, and a generator of what it was trained on.

It knows shapes, invoice pages and short clips as drawn here, in this font and these wordings, and nothing else.
"""

from __future__ import annotations

from pathlib import Path

from prism_server.demo_model.drawing import encode_jpeg, encode_png
from prism_server.demo_model.layouts import LAYOUT_BY_NAME, LAYOUTS, Layout
from prism_server.demo_model.samples import Sample, draw_sample
from prism_server.demo_model.turns import Turn

__all__ = [
    "LAYOUTS",
    "LAYOUT_BY_NAME",
    "Layout",
    "Sample",
    "Turn",
    "checkpoint_dir",
    "draw_sample",
    "encode_jpeg",
    "encode_png",
]


def checkpoint_dir() -> Path:
    """The directory of the bundled checkpoint, in the layout of a released Qwen3-VL."""
    return Path(__file__).parent / "checkpoint"
