"""Prism: serving of Qwen3-VL in which media seen before is not decoded, encoded or prefilled again."""

__version__ = "0.1.0"
