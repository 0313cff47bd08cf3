"""Size, patch order and normalisation of pictures, against the reference and as properties."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from media_samples import CONFIG, LIMITS, encode, noise, plain
from PIL import Image
from transformers import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize as reference_resize

from prism_server.media.image import decode
from prism_server.media.processor_config import ImageProcessorConfig, PixelRange
from prism_server.media.qwen import normalised_lut, picture_grid, picture_patches, smart_resize

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)


def reference_of(config: ImageProcessorConfig) -> Qwen2VLImageProcessorPil:
    return Qwen2VLImageProcessorPil(
        size={"shortest_edge": config.pixels.min_pixels, "longest_edge": config.pixels.max_pixels},
        patch_size=config.patch_size,
        temporal_patch_size=config.temporal_patch_size,
        merge_size=config.merge_size,
        image_mean=list(config.mean),
        image_std=list(config.std),
    )


def assert_equals_reference(data: bytes, config: ImageProcessorConfig) -> None:
    picture = decode(data, LIMITS, "p")
    ours = picture_patches(picture, picture_grid(*picture.size, config, config.pixels), config)
    lut = normalised_lut(config)
    normalised = np.stack([lut[ours.pixels[:, c], c] for c in range(3)], axis=1)
    values = normalised.repeat(config.temporal_patch_size, axis=2).reshape(len(ours.pixels), -1)
    theirs = reference_of(config)(images=picture, return_tensors="np")
    assert tuple(theirs["image_grid_thw"][0]) == ours.grid
    assert theirs["pixel_values"].dtype == values.dtype == np.float32
    np.testing.assert_array_equal(values, theirs["pixel_values"])


@pytest.mark.parametrize(
    ("width", "height"),
    [
        (1, 1), (31, 32), (27, 300), (64, 64), (16, 48), (48, 80), (100, 75), (640, 427), (427, 640), (1500, 1000),
        (2, 400), (400, 2), (3000, 15), (384, 384), (385, 383), (512, 16), (33, 65),
    ],
)  # fmt: skip
def test_pixel_values_equal_the_reference_bit_for_bit(width: int, height: int) -> None:
    assert_equals_reference(encode(noise(width, height)), CONFIG)


@pytest.mark.parametrize(("mode", "fmt"), [("L", "PNG"), ("1", "PNG"), ("P", "PNG"), ("RGB", "JPEG"), ("CMYK", "JPEG")])
def test_pixel_values_of_other_modes_equal_the_reference(mode: str, fmt: str) -> None:
    assert_equals_reference(encode(noise(90, 130).convert(mode), fmt), CONFIG)


@pytest.mark.parametrize("patch_size", [14, 16])
def test_another_normalisation_and_patch_size_equal_the_reference(patch_size: int) -> None:
    config = ImageProcessorConfig(patch_size, 2, 2, PixelRange(56 * 56, 28 * 28 * 64), CLIP_MEAN, CLIP_STD)
    assert_equals_reference(encode(noise(300, 123)), config)


def test_the_lut_holds_every_byte_in_every_channel() -> None:
    config = ImageProcessorConfig(16, 2, 2, CONFIG.pixels, CLIP_MEAN, CLIP_STD)
    lut = normalised_lut(config)
    assert (lut.shape, lut.dtype) == ((256, 3), np.float32)
    np.testing.assert_allclose(lut[255], (1 - np.array(CLIP_MEAN)) / CLIP_STD, rtol=1e-6)
    assert normalised_lut(CONFIG)[0].tolist() == [-1.0] * 3


def test_patches_of_one_token_lie_together() -> None:
    picture = Image.new("RGB", (64, 64))
    for row in range(4):
        for column in range(4):
            picture.paste((row, column, 7), (column * 16, row * 16, column * 16 + 16, row * 16 + 16))
    patches = picture_patches(picture, (1, 4, 4), CONFIG)
    assert patches.pixels.shape == (16, 3, 1, 16, 16)
    assert patches.num_bytes == 16 * 768
    places = [tuple(int(value) for value in patch[:2, 0, 0, 0]) for patch in patches.pixels]
    assert places[:6] == [(0, 0), (0, 1), (1, 0), (1, 1), (0, 2), (0, 3)]
    assert places[8:10] == [(2, 0), (2, 1)]
    assert all((patch.reshape(3, -1) == patch[:, 0, 0, :1]).all() for patch in patches.pixels)


def test_shared_patches_cannot_be_written() -> None:
    patches = picture_patches(plain("red"), (1, 4, 4), CONFIG)
    with pytest.raises(ValueError, match="read-only"):
        patches.pixels[0] = 0


sides = st.integers(1, 6000)


@settings(max_examples=400, deadline=None)
@example(9, 9, 28, 17**2 * 28**2, 1 << 22)  # a whole number of steps, in floats a little more: one step too long
@given(sides, sides, st.sampled_from([28, 32]), st.integers(1, 1 << 20), st.integers(0, 1 << 22))
def test_sizes_equal_the_reference_are_multiples_and_keep_within_the_limits(
    height: int, width: int, factor: int, least: int, more: int
) -> None:
    if max(height, width) > 200 * min(height, width):
        return
    pixels = PixelRange(least, least + more)
    shown = smart_resize(height, width, factor, pixels)
    assert shown == reference_resize(height, width, factor, pixels.min_pixels, pixels.max_pixels)
    assert all(side >= factor and side % factor == 0 for side in shown)
    rounded_area = round(height / factor) * round(width / factor) * factor**2
    area = shown[0] * shown[1]
    if rounded_area > pixels.max_pixels:
        assert area <= pixels.max_pixels or min(shown) == factor
    elif rounded_area < pixels.min_pixels:
        assert area >= pixels.min_pixels
        excess = (shown[0] - factor) * (shown[1] - factor)
        assert excess <= pixels.min_pixels, "no side is more than one step too long"
    else:
        assert pixels.min_pixels <= area <= pixels.max_pixels
