"""Qwen3-VL: configuration, checkpoint, vision tower, language model."""

from prism_server.model.config import ModelConfig, TextConfig, VisionConfig
from prism_server.model.qwen3_vl import Qwen3VL
from prism_server.model.text import FeatureRows, TextModel
from prism_server.model.vision import Features, VisionState, VisionTower

__all__ = [
    "FeatureRows",
    "Features",
    "ModelConfig",
    "Qwen3VL",
    "TextConfig",
    "TextModel",
    "VisionConfig",
    "VisionState",
    "VisionTower",
]
