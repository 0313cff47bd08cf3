"""A picture's own memory as an array: the pixels that numpy would copy, for as long as anybody looks at them."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from PIL import Image

from prism_server.media.pixels import rgb_pixels


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8))


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (64, 32), (333, 41)])
def test_the_pixels_are_those_of_a_copy(size: tuple[int, int]) -> None:
    picture = noise(*size)
    pixels = rgb_pixels(picture)
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, np.asarray(picture))


def test_nothing_is_copied_and_nothing_can_be_written() -> None:
    picture = noise(40, 30)
    pixels = rgb_pixels(picture)
    assert np.shares_memory(pixels, rgb_pixels(picture))
    assert not pixels.flags.writeable
    picture.putpixel((3, 2), (1, 2, 3))
    assert pixels[2, 3].tolist() == [1, 2, 3]


def test_the_pixels_outlive_the_picture() -> None:
    picture = noise(100, 90)
    copied, pixels = np.asarray(picture).copy(), rgb_pixels(picture)
    picture.close()
    del picture
    gc.collect()
    others = [noise(100, 90, seed) for seed in range(1, 50)]  # would take the memory if it were free
    assert np.array_equal(pixels, copied)
    assert len(others) == 49


def test_a_picture_in_several_pieces_of_memory_is_copied() -> None:
    picture = Image.new("RGB", (2200, 2200), (9, 8, 7))
    picture.putpixel((2199, 2199), (1, 2, 3))
    pixels = rgb_pixels(picture)
    assert not np.shares_memory(pixels, rgb_pixels(picture))
    assert pixels.shape == (2200, 2200, 3)
    assert pixels[-1, -2:].tolist() == [[9, 8, 7], [1, 2, 3]]


@pytest.mark.parametrize("mode", ["L", "RGBA", "RGBX", "CMYK"])
def test_other_modes_are_not_taken_for_rgb(mode: str) -> None:
    with pytest.raises(ValueError, match=mode):
        rgb_pixels(Image.new(mode, (4, 4)))
