"""Types of command-line arguments that several commands of `prism-bench` take."""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from prism_server.errors import StartupError


def positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)


def positive_number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not (number > 0 and math.isfinite(number)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def comma_list(text: str) -> tuple[int, ...]:
    """`1,8,32`."""
    return tuple(positive(part) for part in text.split(","))


def size(text: str) -> tuple[int, int]:
    """`448x448`: width and height in pixels."""
    width, _, height = text.partition("x")
    if not all(side.isascii() and side.isdigit() and int(side) > 0 for side in (width, height)):
        raise argparse.ArgumentTypeError(f"{text!r} must look like 448x448")
    return int(width), int(height)


def group_option(text: str) -> tuple[str, str]:
    """`kv.page_tokens=16`: an option of prism-serve and its value."""
    name, equals, value = text.partition("=")
    if not equals or "." not in name:
        raise argparse.ArgumentTypeError(f"{text!r} must look like kv.page_tokens=16")
    return name, value


def api_key(path: Path | None) -> str | None:
    """The first line of the file; StartupError if it cannot be read."""
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8").split("\n")[0].strip()
    except OSError as error:
        raise StartupError(f"--api-key-file {path}: cannot be read: {error.strerror}") from None
