"""How a checkpoint wants its pictures: sizes, patches, normalisation; read from either layout of its files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from prism_server.checkpoint_files import read_object
from prism_server.errors import BadRequest, StartupError
from prism_server.identity import MediaOptions, framed_digest

MERGED_FILE = "processor_config.json"
"""Written by transformers 5: one file, pictures under the key `image_processor`. It wins where both exist."""
PLAIN_FILE = "preprocessor_config.json"

BICUBIC = 3
CHANNELS = 3


@dataclass(frozen=True, slots=True)
class PixelRange:
    """Area in pixels, after resizing, that the resize rule aims for."""

    min_pixels: int
    max_pixels: int

    def __post_init__(self) -> None:
        if self.min_pixels < 1:
            raise ValueError("the pixel limits must be at least 1")
        if self.min_pixels > self.max_pixels:
            raise ValueError(f"the least area {self.min_pixels} is above the largest {self.max_pixels}")


@dataclass(frozen=True)
class ImageProcessorConfig:
    """The picture half of a checkpoint's processor, with the server's own limit applied to `pixels`."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    pixels: PixelRange
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float = 1 / 255

    def __post_init__(self) -> None:
        if min(self.patch_size, self.temporal_patch_size, self.merge_size) < 1:
            raise ValueError("patch_size, temporal_patch_size and merge_size must be at least 1")
        if not all(self.std):
            raise ValueError("image_std must not hold a zero")

    @property
    def factor(self) -> int:
        """Both sides of a resized picture are multiples of it, in pixels."""
        return self.patch_size * self.merge_size

    @cached_property
    def fingerprint(self) -> str:
        """64 hex digits over every field: caches made under another fingerprint show other pixels."""
        return framed_digest("image-processor", (json.dumps(asdict(self), sort_keys=True),)).hex()

    def pixels_for(self, options: MediaOptions, param: str) -> PixelRange:
        """The range narrowed by what a request says; BadRequest where the two leave nothing."""
        return narrowed(self.pixels, options, param)


def narrowed(pixels: PixelRange, options: MediaOptions, param: str) -> PixelRange:
    """`pixels` as far as a request's options leave it. Raises BadRequest where that is nothing.

    A request can only narrow: what it asks for beyond the server's range is cut to the range.
    """
    for name, value in (("min_pixels", options.min_pixels), ("max_pixels", options.max_pixels)):
        if value is not None and value < 1:
            raise BadRequest(f"{name} must be at least 1, not {value}", f"{param}.{name}")
    least = max(pixels.min_pixels, options.min_pixels or 0)
    most = pixels.max_pixels if options.max_pixels is None else min(pixels.max_pixels, options.max_pixels)
    if least > most:
        name = "min_pixels" if options.max_pixels is None else "max_pixels"
        raise BadRequest(
            f"no size is left: the medium would need at least {least} and at most {most} pixels "
            f"(this model takes {pixels.min_pixels} to {pixels.max_pixels})",
            f"{param}.{name}",
        )
    return PixelRange(least, most)


def load_image_processor(directory: Path, max_image_tokens: int) -> ImageProcessorConfig:
    """Reads the picture processor of the checkpoint in `directory`.

    The largest area is the smaller of the checkpoint's and `max_image_tokens` (a token shows
    (patch_size * merge_size)^2 pixels). Raises StartupError, one line, for a file that is missing or of another family.
    """
    path, raw = _read(directory)
    try:
        return _parse(raw, max_image_tokens)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) else str(error)
        raise StartupError(f"{path}: {reason}") from error


def _read(directory: Path) -> tuple[Path, Mapping[str, Any]]:
    """The file that counts and its picture section."""
    found = read_section(directory, ((MERGED_FILE, "image_processor"), (PLAIN_FILE, None)))
    if found is None:
        raise StartupError(f"{directory}: no picture processor: neither {MERGED_FILE} nor {PLAIN_FILE} has one")
    return found


def read_section(directory: Path, places: Iterable[tuple[str, str | None]]) -> tuple[Path, Mapping[str, Any]] | None:
    """The first of `places` (a file's name and the key of its section, None for all of it) that is there.

    Raises StartupError for a file that is no JSON object.
    """
    for name, key in places:
        path = directory / name
        if not path.is_file():
            continue
        raw = read_object(path)
        section = raw.get(key) if key else raw
        if section is None:  # an older processor_config.json says nothing about this half
            continue
        if not isinstance(section, dict):
            raise StartupError(f"{path}: expected an object with the processor's options")
        return path, section
    return None


def _parse(raw: Mapping[str, Any], max_image_tokens: int) -> ImageProcessorConfig:
    family = raw.get("image_processor_type", "Qwen2VLImageProcessor")
    if not isinstance(family, str) or "VLImageProcessor" not in family or not family.startswith("Qwen"):
        raise ValueError(f"image_processor_type {family!r} is not of the Qwen-VL family")
    check_transforms(raw, ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"))
    patch_size, merge_size = integer(raw, "patch_size"), integer(raw, "merge_size")
    least, most = area(raw, "shortest_edge", "min_pixels"), area(raw, "longest_edge", "max_pixels")
    allowed = max_image_tokens * (patch_size * merge_size) ** 2
    if allowed < least:
        raise ValueError(f"media.max_image_tokens {max_image_tokens} allows {allowed} pixels, the model needs {least}")
    return ImageProcessorConfig(
        patch_size=patch_size,
        temporal_patch_size=integer(raw, "temporal_patch_size"),
        merge_size=merge_size,
        pixels=PixelRange(least, min(most, allowed)),
        mean=channels(raw, "image_mean"),
        std=channels(raw, "image_std"),
        rescale_factor=float(raw.get("rescale_factor", 1 / 255)),
    )


def check_transforms(raw: Mapping[str, Any], switches: Iterable[str]) -> None:
    """Raises ValueError unless every step is on and resizing is bicubic: nothing else is implemented."""
    for switch in switches:
        if raw.get(switch, True) is not True:
            raise ValueError(f"{switch} must be true, not {raw[switch]!r}")
    if raw.get("resample", BICUBIC) != BICUBIC:
        raise ValueError(f"resample must be {BICUBIC} (bicubic), not {raw['resample']!r}")


def integer(raw: Mapping[str, Any], key: str) -> int:
    value = raw[key]
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{key} must be a positive integer, not {value!r}")
    return value


def area(raw: Mapping[str, Any], edge_key: str, pixels_key: str) -> int:
    """An area in pixels (the names in `size` say "edge"). The older top-level key wins, as in the reference."""
    if raw.get(pixels_key) is not None:
        return integer(raw, pixels_key)
    size = raw.get("size")
    if isinstance(size, dict):
        for key in (edge_key, pixels_key):
            if size.get(key) is not None:
                return integer(size, key)
    raise ValueError(f"neither size.{edge_key} nor {pixels_key} is given")


def channels(raw: Mapping[str, Any], key: str) -> tuple[float, float, float]:
    values = raw[key]
    if not isinstance(values, list) or len(values) != CHANNELS:
        raise ValueError(f"{key} must be a list of {CHANNELS} numbers, not {values!r}")
    red, green, blue = (float(value) for value in values)
    return red, green, blue
