"""Colours, shapes and letters, and pictures as files."""

from __future__ import annotations

import functools
import io
import math
import random

from PIL import Image, ImageDraw, ImageFont

RGB = tuple[int, int, int]

COLORS: dict[str, RGB] = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (150, 60, 190),
    "orange": (245, 140, 30),
    "pink": (250, 150, 190),
    "brown": (130, 80, 40),
}
COLOR_NAMES = tuple(COLORS)
SHAPES = ("circle", "square", "triangle", "star", "cross", "diamond")
GROUNDS = (255, 245, 230, 30, 15)
"""Grey levels behind shapes."""


def jittered(rng: random.Random, color: RGB, by: int = 14) -> RGB:
    """The colour with each channel moved by up to `by`."""
    red, green, blue = (max(0, min(255, channel + rng.randint(-by, by))) for channel in color)
    return red, green, blue


def draw_shape(draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, radius: float, fill: RGB) -> None:
    """Fills one of `SHAPES` around (x, y); all but the square touch the circle of `radius`."""
    r = radius
    match shape:
        case "circle":
            draw.ellipse([x - r, y - r, x + r, y + r], fill=fill)
        case "square":
            draw.rectangle([x - r * 0.85, y - r * 0.85, x + r * 0.85, y + r * 0.85], fill=fill)
        case "triangle":
            draw.polygon([(x, y - r), (x - r, y + r * 0.8), (x + r, y + r * 0.8)], fill=fill)
        case "diamond":
            draw.polygon([(x, y - r), (x + r * 0.7, y), (x, y + r), (x - r * 0.7, y)], fill=fill)
        case "cross":
            arm = r * 0.38
            draw.rectangle([x - arm, y - r, x + arm, y + r], fill=fill)
            draw.rectangle([x - r, y - arm, x + r, y + arm], fill=fill)
        case "star":
            draw.polygon([_star_point(x, y, r, corner) for corner in range(10)], fill=fill)
        case _:
            raise ValueError(f"unknown shape {shape!r}; known: {', '.join(SHAPES)}")


def _star_point(x: float, y: float, radius: float, corner: int) -> tuple[float, float]:
    angle = -math.pi / 2 + corner * math.pi / 5
    reach = radius if corner % 2 == 0 else radius * 0.42
    return x + reach * math.cos(angle), y + reach * math.sin(angle)


@functools.cache
def font(size: int) -> ImageFont.FreeTypeFont:
    """Pillow's own TrueType face, the only one the model has seen; `size` in pixels."""
    face = ImageFont.load_default(size=size)
    assert isinstance(face, ImageFont.FreeTypeFont), "Pillow was built without FreeType"
    return face


@functools.cache
def advance(size: int, character: str) -> float:
    """Pixels from this character to the next."""
    return font(size).getlength(character)


def text_width(size: int, text: str) -> float:
    """Pixels; the sum of the characters' advances, without kerning."""
    return sum(advance(size, character) for character in text)


def encode_png(image: Image.Image) -> bytes:
    """The picture as a PNG file, pixels unchanged."""
    return _encoded(image, "PNG")


def encode_jpeg(image: Image.Image, quality: int = 90) -> bytes:
    """The picture as a JPEG file, as a camera or a browser would send it."""
    return _encoded(image, "JPEG", quality=quality)


def _encoded(image: Image.Image, file_format: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, file_format, **options)
    return buffer.getvalue()
