"""The Qwen-VL rules for pixels: the size a picture is shown at, the order of patches, the normalisation.

Written against transformers 5.17 `models/qwen2_vl/image_processing_pil_qwen2_vl.py`, whose `pixel_values` equal
those looked up in `normalised_lut(config)` bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt
from PIL import Image

from prism_server.media.item import Patches
from prism_server.media.pixels import rgb_pixels
from prism_server.media.processor_config import CHANNELS, ImageProcessorConfig, PixelRange
from prism_server.media.video_config import VideoProcessorConfig

Grid = tuple[int, int, int]


def smart_resize(height: int, width: int, factor: int, pixels: PixelRange) -> tuple[int, int]:
    """Height and width, in pixels, at which a picture is shown: multiples of `factor`, ratio roughly kept.

    Sides are rounded to the nearest multiple (halves to the even one); an area outside `pixels` is then scaled back
    into it, downwards with floor, upwards with ceil. A side is never below `factor`, so the area of a very thin
    picture can end above `max_pixels`.
    """
    shown_height = round(height / factor) * factor
    shown_width = round(width / factor) * factor
    if shown_height * shown_width > pixels.max_pixels:
        shrink = math.sqrt(height * width / pixels.max_pixels)
        shown_height = max(factor, math.floor(height / shrink / factor) * factor)
        shown_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif shown_height * shown_width < pixels.min_pixels:
        grow = math.sqrt(pixels.min_pixels / (height * width))
        shown_height = math.ceil(height * grow / factor) * factor
        shown_width = math.ceil(width * grow / factor) * factor
    return shown_height, shown_width


def picture_grid(width: int, height: int, config: ImageProcessorConfig, pixels: PixelRange) -> Grid:
    """(1, rows, columns) of patches for a picture of `width` x `height` pixels."""
    shown_height, shown_width = smart_resize(height, width, config.factor, pixels)
    return 1, shown_height // config.patch_size, shown_width // config.patch_size


def picture_patches(picture: Image.Image, grid: Grid, config: ImageProcessorConfig) -> Patches:
    """Resizes an RGB picture (bicubic) to `grid` and cuts it: uint8 [rows * columns, 3, 1, patch, patch], read-only.

    Patches that one token shows (merge x merge of them, row by row) lie together; tokens follow row by row.
    """
    cut = np.expand_dims(_cut(picture, grid, config.patch_size, config.merge_size), 2)
    return Patches(grid, _shared(cut))


def clip_patches(
    frames: Iterable[Image.Image], grid: Grid, config: VideoProcessorConfig, share_repeats: bool = False
) -> Patches:
    """Resizes RGB frames (bicubic) to `grid` and cuts them: uint8 [t * rows * columns, 3, frames, patch, patch].

    Patches of one temporal patch lie as those of a picture do; the last frame fills the last one. At least one frame.
    With `share_repeats` a temporal patch whose pixels are those of the one before is left out.

    Frames are resized across first and down then: so does torchvision, with which the reference resizes clips. Pillow
    by itself begins with what is less work; every third value would differ from the reference where that is down.
    """
    depth, (runs, rows, columns) = config.temporal_patch_size, grid
    shape = (runs, rows * columns, CHANNELS, depth, config.patch_size, config.patch_size)
    cut = np.empty(shape, dtype=np.uint8)
    number = -1
    for number, frame in enumerate(frames):
        across = _resized(frame, (columns * config.patch_size, frame.height))
        del frame  # before the next one is decoded
        cut[number // depth, :, :, number % depth] = _cut(across, grid, config.patch_size, config.merge_size)
    if number // depth != runs - 1:
        raise ValueError(f"{number + 1} frames do not fill a grid of {grid}")
    for missing in range(number + 1, runs * depth):
        cut[-1, :, :, missing % depth] = cut[-1, :, :, number % depth]
    if share_repeats:
        is_new = np.array([not run or not np.array_equal(cut[run], cut[run - 1]) for run in range(runs)])
        if not is_new.all():
            kept = cut[is_new].reshape(-1, *shape[2:])
            return Patches(grid, _shared(kept), (np.cumsum(is_new) - 1).astype(np.int32))
    return Patches(grid, _shared(cut.reshape(runs * rows * columns, *shape[2:])))


def _cut(picture: Image.Image, grid: Grid, patch: int, merge: int) -> npt.NDArray[np.uint8]:
    """One picture as uint8 [rows * columns, 3, patch, patch], its merge blocks row by row."""
    _, rows, columns = grid
    shown = rgb_pixels(_resized(picture, (columns * patch, rows * patch)))
    pixels = shown.reshape(rows // merge, merge, patch, columns // merge, merge, patch, CHANNELS)
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 4, 6, 2, 5)).reshape(rows * columns, CHANNELS, patch, patch)


def _resized(picture: Image.Image, size: tuple[int, int]) -> Image.Image:
    """By bicubic filtering; the picture itself where nothing is to be done (Pillow would copy it)."""
    return picture if picture.size == size else picture.resize(size, Image.Resampling.BICUBIC)


def _shared(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Read-only: every request that shows this medium reads the same array."""
    pixels.flags.writeable = False
    return pixels


def normalised_lut(config: ImageProcessorConfig) -> npt.NDArray[np.float32]:
    """float32 [256, 3]: what a byte becomes in each channel. `lut[pixel, channel]` is the model's input.

    Rescaled in float64 and rounded to float32, then normalised in float32: the reference's order of roundings.
    """
    rescaled = (np.arange(256, dtype=np.float64) * config.rescale_factor).astype(np.float32)
    mean, std = np.array(config.mean, dtype=np.float32), np.array(config.std, dtype=np.float32)
    lut: npt.NDArray[np.float32] = (rescaled[:, None] - mean) / std
    return lut
