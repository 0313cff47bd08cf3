"""Pictures as people send them: every mode, orientation, damage and bomb."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from media_samples import (
    LIMITS,
    encode,
    exif_orientation,
    noise,
    peak_growth_bytes,
    plain,
    png_chunk,
    png_of_zeros,
    png_with,
)
from PIL import Image

from prism_server.errors import BadRequest
from prism_server.media.image import decode, read_header
from prism_server.media.limits import MediaLimits

MIB = 1 << 20
PARAM = "messages[0].content[1]"


def pixel(data: bytes, at: tuple[int, int] = (0, 0)) -> tuple[int, ...]:
    value = decode(data, LIMITS, PARAM).getpixel(at)
    assert isinstance(value, tuple)
    return value


def refusal(call: Callable[[], object]) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        call()
    assert caught.value.param == PARAM
    assert 400 <= caught.value.status < 500
    assert caught.value.reason
    return caught.value


@pytest.mark.parametrize(("width", "height"), [(13_000, 13_000), (14_000, 14_000)])
def test_a_decompression_bomb_is_refused_from_the_header_without_the_memory(width: int, height: int) -> None:
    data = png_of_zeros(width, height)
    assert len(data) < 64 * 1024
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")  # what is collected meanwhile has warnings of its own
        warnings.simplefilter("always", Image.DecompressionBombWarning)
        grown = peak_growth_bytes(lambda: refusal(lambda: decode(data, LIMITS, PARAM)))
        error = refusal(lambda: read_header(data, LIMITS, PARAM))
    assert grown < 16 * MIB, "one byte a pixel would be above 160 MiB"
    assert str(width * height) in error.reason
    assert str(LIMITS.max_decoded_pixels) in error.reason
    assert caught == []


def test_a_webp_canvas_beyond_the_limit_is_refused_from_the_header_without_the_memory() -> None:
    frame = encode(plain("red", 16, 16), "WEBP", lossless=True)[12:]
    canvas = bytes(4) + (16383 - 1).to_bytes(3, "little") * 2
    body = b"WEBP" + b"VP8X" + struct.pack("<I", 10) + canvas + frame
    data = b"RIFF" + struct.pack("<I", len(body)) + body
    assert peak_growth_bytes(lambda: refusal(lambda: read_header(data, LIMITS, PARAM))) < 16 * MIB


def test_the_memory_test_would_see_a_decoded_bomb() -> None:
    assert peak_growth_bytes(lambda: Image.new("L", (13_000, 13_000), 1).close()) > 96 * MIB


def test_a_limit_above_pillows_own_is_kept_and_pillows_setting_is_left_alone() -> None:
    before = Image.MAX_IMAGE_PIXELS
    roomy = MediaLimits(max_items=1, max_item_bytes=MIB, max_decoded_pixels=200_000_000)
    header = read_header(png_of_zeros(14_000, 14_000), roomy, PARAM)
    assert (header.width, header.height, header.mode) == (14_000, 14_000, "1")
    assert before == Image.MAX_IMAGE_PIXELS


def test_ratio_200_is_accepted_and_above_it_is_refused_from_the_header() -> None:
    assert read_header(encode(plain("red", 1, 200)), LIMITS, PARAM).height == 200
    assert "200 times" in refusal(lambda: read_header(encode(plain("red", 1, 201)), LIMITS, PARAM)).reason
    assert "200 times" in refusal(lambda: read_header(encode(plain("red", 401, 2)), LIMITS, PARAM)).reason


@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"])
def test_a_picture_cut_in_half_is_a_400(fmt: str) -> None:
    data = encode(noise(120, 90), fmt)
    data = data[: len(data) // 2]
    refusal(lambda: decode(data, LIMITS, PARAM))


def test_half_a_jpeg_has_a_header_and_fails_only_when_it_is_decoded() -> None:
    data = encode(noise(300, 200), "JPEG")
    data = data[: len(data) // 2]
    header = read_header(data, LIMITS, PARAM)
    assert (header.width, header.height) == (300, 200)
    assert "cannot be decoded" in refusal(lambda: decode(data, LIMITS, PARAM)).reason


@pytest.mark.parametrize(
    "data", [b"", b"just text in a .png", b"%!PS-Adobe-3.0 EPSF-3.0", b"8BPS\0\1", b"\x89PNG\r\n\x1a\n"]
)
def test_what_is_no_picture_is_a_400(data: bytes) -> None:
    refusal(lambda: read_header(data, LIMITS, PARAM))


def size_or_refusal(data: bytes) -> tuple[int, int] | BadRequest:
    """The upright size, the same in header and pixels, or the 400."""
    try:
        header = read_header(data, LIMITS, PARAM)
        decoded = decode(data, LIMITS, PARAM)
    except BadRequest as error:
        return error
    assert decoded.mode == "RGB"
    assert decoded.size == (header.width, header.height)
    return decoded.size


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "AVIF"])
def test_bytes_changed_anywhere_give_a_picture_or_a_400(fmt: str) -> None:
    rng = np.random.default_rng(1)
    data = encode(noise(24, 18), fmt)
    answers = []
    for _ in range(80):
        broken = bytearray(data)
        for at in rng.integers(0, len(data) // 2, 3):
            broken[at] = rng.integers(0, 256)
        answers.append(size_or_refusal(bytes(broken)))
    refused = [answer for answer in answers if isinstance(answer, BadRequest)]
    assert refused
    assert all(answer.param == PARAM for answer in refused)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("fmt", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "MPO"])
def test_exif_orientation_is_applied_once_and_the_header_says_the_upright_size(fmt: str, orientation: int) -> None:
    stored = Image.new("RGB", (48, 32), "white")
    stored.paste("red", (0, 0, 16, 16))
    exif = exif_orientation(orientation)
    more_frames = {"save_all": True, "append_images": [plain("blue", 48, 32)]} if fmt == "MPO" else {}
    data = encode(stored, fmt, exif=exif, **more_frames)
    red_corner = {1: (0, 0), 2: (-1, 0), 3: (-1, -1), 4: (0, -1), 5: (0, 0), 6: (-1, 0), 7: (-1, -1), 8: (0, -1)}
    header = read_header(data, LIMITS, PARAM)
    upright = decode(data, LIMITS, PARAM)
    assert upright.size == (header.width, header.height) == ((32, 48) if orientation >= 5 else (48, 32))
    right, bottom = red_corner[orientation]
    corner = upright.getpixel((upright.width - 4 if right else 4, upright.height - 4 if bottom else 4))
    assert isinstance(corner, tuple)
    assert corner[0] > 200
    assert max(corner[1:]) < 60
    assert sum(np.asarray(upright)[..., 1].ravel() < 100) < 48 * 32 / 4, "only one corner is red"


def test_an_orientation_after_the_pixels_of_a_png_counts_and_needs_no_decoding() -> None:
    data = png_with(encode(noise(48, 32)), png_chunk(b"eXIf", exif_orientation(6)[6:]), before=b"IEND")
    header = read_header(data, LIMITS, PARAM)
    assert (header.width, header.height) == (32, 48)
    assert decode(data, LIMITS, PARAM).size == (32, 48)


@pytest.mark.parametrize("fmt", ["PNG", "TIFF", "WEBP"])
def test_an_orientation_in_xmp_gives_header_and_pixels_the_same_size(fmt: str) -> None:
    xmp = b'<x:xmpmeta><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    picture = noise(48, 32)
    if fmt == "PNG":
        text = b"XML:com.adobe.xmp\0\0\0\0\0" + xmp
        data = png_with(encode(picture), png_chunk(b"iTXt", text), before=b"IDAT")
    elif fmt == "TIFF":
        data = encode(picture, fmt, tiffinfo={700: xmp})
    else:
        data = encode(picture, fmt, xmp=xmp)
    header = read_header(data, LIMITS, PARAM)
    assert (header.width, header.height) == (32, 48)
    assert decode(data, LIMITS, PARAM).size == (32, 48)


def test_a_senseless_orientation_is_no_orientation() -> None:
    assert read_header(encode(noise(48, 32), "JPEG", exif=exif_orientation(77)), LIMITS, PARAM).width == 48


@pytest.mark.parametrize(
    ("mode", "fmt", "clear", "half", "half_seen"),
    [
        ("RGBA", "PNG", (10, 20, 30, 0), (0, 0, 0, 128), (127, 127, 127)),
        ("LA", "PNG", (10, 0), (0, 128), (127, 127, 127)),
        ("RGBA", "WEBP", (10, 20, 30, 0), (0, 0, 0, 128), (127, 127, 127)),
        ("RGBA", "TIFF", (10, 20, 30, 0), (0, 0, 0, 128), (127, 127, 127)),
    ],
)
def test_transparent_pixels_are_flattened_on_white(
    mode: str, fmt: str, clear: tuple[int, ...], half: tuple[int, ...], half_seen: tuple[int, int, int]
) -> None:
    picture = plain(clear, 8, 8, mode)
    picture.putpixel((4, 4), half)
    data = encode(picture, fmt, **({"lossless": True, "exact": True} if fmt == "WEBP" else {}))
    assert pixel(data) == (255, 255, 255)
    assert pixel(data, (4, 4)) == half_seen


def test_transparent_palette_entries_are_flattened_on_white() -> None:
    picture = plain(0, 8, 8, "P")
    picture.putpalette([200, 0, 0, 0, 0, 200])
    picture.putpixel((4, 4), 1)
    one_entry = encode(picture, transparency=0)
    assert (pixel(one_entry), pixel(one_entry, (4, 4))) == ((255, 255, 255), (0, 0, 200))
    alphas = encode(picture, transparency=bytes([255, 128]))
    assert (pixel(alphas), pixel(alphas, (4, 4))) == ((200, 0, 0), (127, 127, 227))
    gif = encode(picture, "GIF", transparency=0)
    assert (pixel(gif), pixel(gif, (4, 4))) == ((255, 255, 255), (0, 0, 200))


def test_a_transparent_key_colour_is_flattened_on_white_at_every_bit_depth() -> None:
    grey = encode(plain(7, 8, 8, "L"), transparency=7)
    assert pixel(grey) == (255, 255, 255)
    rgb = encode(plain((1, 2, 3), 8, 8), transparency=(1, 2, 3))
    assert pixel(rgb) == (255, 255, 255)
    black = encode(plain(0, 8, 8, "1"), transparency=0)
    assert pixel(black) == (255, 255, 255)
    sixteen = plain(0, 8, 8, "I;16")
    sixteen.putpixel((4, 4), 0x8080)
    data = png_with(encode(sixteen), png_chunk(b"tRNS", struct.pack(">H", 0)), before=b"IDAT")
    assert (pixel(data), pixel(data, (4, 4))) == ((255, 255, 255), (128, 128, 128))


def raw_png(bit_depth: int, colour_type: int, row: bytes, width: int, extra: bytes = b"") -> bytes:
    """A PNG of one row, for the depths that Pillow cannot write."""
    header = struct.pack(">IIBBBBB", width, 1, bit_depth, colour_type, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header) + extra + png_chunk(b"IDAT", zlib.compress(b"\0" + row))
    return b"\x89PNG\r\n\x1a\n" + chunks + png_chunk(b"IEND", b"")


def test_a_key_colour_is_compared_on_the_scale_of_the_file() -> None:
    two_bits = raw_png(2, 0, bytes([0b00_01_10_11]), 4, png_chunk(b"tRNS", struct.pack(">H", 1)))
    assert [pixel(two_bits, (x, 0))[0] for x in range(4)] == [0, 255, 170, 255]
    colours = struct.pack(">6H", 0x1234, 0x5678, 0x9ABC, 0xFFFF, 0x8000, 0)
    deep = raw_png(16, 2, colours, 2, png_chunk(b"tRNS", struct.pack(">3H", 0x1234, 0x5678, 0x9ABC)))
    assert (pixel(deep), pixel(deep, (1, 0))) == ((255, 255, 255), (255, 128, 0))


@pytest.mark.parametrize("fmt", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_is_scaled_not_clipped(fmt: str) -> None:
    ramp = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    seen = np.asarray(decode(encode(Image.fromarray(ramp), fmt), LIMITS, PARAM))
    assert (seen == (ramp >> 8)[..., None]).all()


def test_16_bit_colour_is_scaled_not_clipped() -> None:
    data = raw_png(16, 2, struct.pack(">6H", 0, 0x4000, 0x8000, 0xC000, 0xFF00, 0xFFFF), 2)
    assert (pixel(data), pixel(data, (1, 0))) == ((0, 64, 128), (192, 255, 255))


@pytest.mark.parametrize("mode", ["F", "I"])
def test_samples_without_a_scale_are_refused_from_the_header(mode: str) -> None:
    data = encode(plain(1, 8, 8, mode), "TIFF")
    assert "8 or 16 bits" in refusal(lambda: read_header(data, LIMITS, PARAM)).reason


def test_cmyk_converts() -> None:
    assert pixel(encode(plain((0, 0, 0, 0), 16, 16, "CMYK"), "JPEG")) == (255, 255, 255)
    red = pixel(encode(plain((0, 255, 255, 0), 16, 16, "CMYK"), "TIFF"))
    assert red == (255, 0, 0)


def test_one_bit_and_palette_pictures_convert() -> None:
    assert pixel(encode(plain(1, 8, 8, "1"))) == (255, 255, 255)
    indexed = plain(3, 8, 8, "P")
    indexed.putpalette([0] * 9 + [9, 8, 7])
    assert pixel(encode(indexed)) == (9, 8, 7)


@pytest.mark.parametrize("fmt", ["GIF", "WEBP", "PNG", "TIFF", "MPO", "AVIF"])
def test_of_an_animation_the_first_frame_is_shown(fmt: str) -> None:
    frames = [plain("red", 32, 32), plain("blue", 32, 32), plain("lime", 32, 32)]
    data = encode(frames[0], fmt, save_all=True, append_images=frames[1:])
    opened = Image.open(io.BytesIO(data))
    assert getattr(opened, "n_frames", 1) > 1
    shown = pixel(data, (16, 16))
    assert shown[0] > 240
    assert max(shown[1:]) < 16
