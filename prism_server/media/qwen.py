"""The Qwen-VL rules for pictures: the size a picture is shown at, the order of its patches, the normalisation.

Written against transformers 5.17 `models/qwen2_vl/image_processing_pil_qwen2_vl.py`, whose `pixel_values` equal
those looked up in `normalised_lut(config)` bit for bit.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from prism_server.media.item import Patches
from prism_server.media.processor_config import CHANNELS, ImageProcessorConfig, PixelRange

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
    _, rows, columns = grid
    patch, merge = config.patch_size, config.merge_size
    shown = picture.resize((columns * patch, rows * patch), Image.Resampling.BICUBIC)
    pixels = np.asarray(shown).reshape(rows // merge, merge, patch, columns // merge, merge, patch, CHANNELS)
    cut = np.ascontiguousarray(pixels.transpose(0, 3, 1, 4, 6, 2, 5))
    cut = cut.reshape(rows * columns, CHANNELS, 1, patch, patch)
    cut.flags.writeable = False  # every request that shows this picture reads the same array
    return Patches(grid, cut)


def normalised_lut(config: ImageProcessorConfig) -> npt.NDArray[np.float32]:
    """float32 [256, 3]: what a byte becomes in each channel. `lut[pixel, channel]` is the model's input.

    Rescaled in float64 and rounded to float32, then normalised in float32: the reference's order of roundings.
    """
    rescaled = (np.arange(256, dtype=np.float64) * config.rescale_factor).astype(np.float32)
    mean, std = np.array(config.mean, dtype=np.float32), np.array(config.std, dtype=np.float32)
    lut: npt.NDArray[np.float32] = (rescaled[:, None] - mean) / std
    return lut
