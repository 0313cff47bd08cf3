"""Reading the small files of a checkpoint directory: text, JSON objects, and what these must hold."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Fields:
    """One JSON object of a configuration. StartupError names what is missing or of another type, with its place."""

    data: Mapping[str, Any]
    place: str

    @classmethod
    def of_file(cls, path: Path) -> Fields:
        return cls(read_object(path), str(path))

    def group(self, key: str) -> Fields:
        value = self.data.get(key)
        if not isinstance(value, dict):
            raise StartupError(f"{self.place}: {key} must be an object, not {value!r}")
        return Fields(value, f"{self.place}: {key}")

    def integer(self, key: str, least: int = 0) -> int:
        value = self.data.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise StartupError(f"{self.place}: {key} must be an integer of at least {least}, not {value!r}")
        return value

    def size(self, key: str) -> int:
        return self.integer(key, least=1)

    def number(self, key: str) -> float:
        value = self.data.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise StartupError(f"{self.place}: {key} must be a positive number, not {value!r}")
        return float(value)

    def integers(self, key: str) -> tuple[int, ...]:
        value = self.data.get(key)
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise StartupError(f"{self.place}: {key} must be a list of integers, not {value!r}")
        return tuple(value)

    def one_of(self, key: str, known: tuple[Any, ...]) -> None:
        """The value, where there is one, must be one that Prism implements."""
        if key in self.data and self.data[key] not in known:
            raise StartupError(f"{self.place}: {key} {self.data[key]!r} is not supported; known: {known}")
