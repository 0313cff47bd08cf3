"""Reading the small JSON files of a checkpoint directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from prism_server.errors import StartupError


def read_text(path: Path) -> str:
    """The file as UTF-8 text. StartupError when it is not there or not readable."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = "is not there" if isinstance(error, FileNotFoundError) else f"cannot be read: {error}"
        raise StartupError(f"{path} {reason}") from error


def read_object(path: Path) -> dict[str, Any]:
    """The file as one JSON object. StartupError when it is missing, is not JSON or is not an object."""
    try:
        value = json.loads(read_text(path))
    except ValueError as error:
        raise StartupError(f"{path} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise StartupError(f"{path} must hold a JSON object, not {type(value).__name__}")
    return value


def read_object_or_empty(path: Path) -> dict[str, Any]:
    """As `read_object`; an absent file is an empty object."""
    return read_object(path) if path.exists() else {}
