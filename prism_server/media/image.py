"""Pictures: what the header says, and the pixels as the model should see them (upright, on white, 8-bit RGB).

Animations (GIF, WebP, APNG, AVIF, MPO) and multi-page TIFF show their first frame.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

# Importing a plugin registers its format. Only these are ever tried: no format that runs an outside program (EPS, WMF)
# or that nobody sends to a model widens what untrusted bytes can reach.
from PIL import (
    AvifImagePlugin,
    BmpImagePlugin,
    ExifTags,
    GifImagePlugin,
    Image,
    ImageFile,
    JpegImagePlugin,
    PngImagePlugin,
    PpmImagePlugin,
    TiffImagePlugin,
    WebPImagePlugin,
)

from prism_server.errors import BadRequest, PrismError
from prism_server.media.limits import MediaLimits
from prism_server.media.picture_file import check_file

FORMATS = tuple(
    plugin.format
    for plugin in (
        JpegImagePlugin.JpegImageFile,  # a JPEG with further pictures inside opens as MPO
        PngImagePlugin.PngImageFile,
        WebPImagePlugin.WebPImageFile,
        GifImagePlugin.GifImageFile,
        BmpImagePlugin.BmpImageFile,
        TiffImagePlugin.TiffImageFile,
        PpmImagePlugin.PpmImageFile,
        AvifImagePlugin.AvifImageFile,
    )
)
MAGIC_BYTES = 16

UPRIGHT = 1
ORIENTATIONS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What each value of the EXIF tag Orientation asks for (EXIF 2.32, 4.6.4); 1 is upright. From 5 on the sides swap."""
FIRST_SIDEWAYS = 5

MAX_EXIF_BYTES = 1 << 20
"""Cameras write some kilobytes, with a small picture inside. More is not looked through for an orientation."""
MAX_SLOW_BYTES = 1 << 19
"""Of what Pillow decodes in Python: half a second, in which every other thread waits for its turn again and again."""
LEAST_TILED_PIXELS = 1 << 24
"""That a TIFF's tiles may have, however small the picture that lies in their corner."""
MAX_TILED_SHARE = 4
"""Tiles that are smaller than their picture cover at most four times as much."""

PNG_SIGNATURE_BYTES = 8
PNG_CHUNK_OVERHEAD_BYTES = 12
PNG_BIT_DEPTH_AT = 24


@dataclass(frozen=True, slots=True)
class PictureHeader:
    """What a picture says about itself. `width` and `height` are those of the upright picture, in pixels.

    `orientation` is the EXIF value that is still to be applied to the decoded pixels.
    """

    format: str
    width: int
    height: int
    mode: str
    orientation: int


def read_header(data: bytes, limits: MediaLimits, param: str) -> PictureHeader:
    """The header's facts, within `limits`, without decoding a pixel. Raises BadRequest."""
    return _checked_header(_open(data, param), data, limits, param)


def decode(data: bytes, limits: MediaLimits, param: str) -> Image.Image:
    """The picture as 8-bit RGB: first frame, upright, transparency flattened on white. Raises BadRequest.

    Its size is always the one that `read_header` gives.
    """
    picture = _open(data, param)
    header = _checked_header(picture, data, limits, param)
    with _reading(param):
        picture.decodermaxblock = max(picture.decodermaxblock, len(data))  # in one go, without copies of pieces
        picture.load()
        upright = _flattened(picture, data)
        if header.orientation != UPRIGHT:
            upright = upright.transpose(ORIENTATIONS[header.orientation])
    if upright.size != (header.width, header.height):
        raise BadRequest(f"the picture's header promises {header.width} x {header.height} pixels, not its data", param)
    return upright


@contextmanager
def _reading(param: str) -> Iterator[None]:
    """Turns whatever the decoders raise into a refusal of this item.

    Broad on purpose: on damaged bytes Pillow's plugins raise OSError, ValueError, SyntaxError, struct.error, EOFError,
    KeyError, OverflowError, DecompressionBombError and more, or a Warning where warnings are errors. All mean the same.
    """
    try:
        yield
    except (PrismError, MemoryError):
        raise
    except Exception as error:
        raise BadRequest(f"the picture cannot be decoded: {str(error) or type(error).__name__}", param) from error


def _open(data: bytes, param: str) -> ImageFile.ImageFile:
    """Parses the header with the plugin whose magic bytes fit.

    Not `Image.open`: it compares sizes with a limit that is global to the process, and warns or raises by it. Prism's
    limits are its own and are checked right after.
    """
    prefix = data[:MAGIC_BYTES]
    for name in FORMATS:
        factory, accept = Image.OPEN[name]
        if accept is not None and accept(prefix) is True:
            check_file(name, data, param)
            with _reading(param):
                return factory(io.BytesIO(data), "")
    raise BadRequest(f"the medium is not a picture of a known format ({', '.join(FORMATS)})", param)


def _checked_header(picture: ImageFile.ImageFile, data: bytes, limits: MediaLimits, param: str) -> PictureHeader:
    width, height = picture.size
    limits.check_picture(width, height, param)  # before the metadata: nothing more is parsed for a picture too large
    _check_decoding(picture, data, param)
    if picture.mode == "F" or (picture.mode == "I" and picture.format == "TIFF"):  # no scale to map to 8 bits by
        raise BadRequest("pictures of float, signed or 32-bit samples are not supported; send 8 or 16 bits", param)
    with _reading(param):
        orientation = _orientation(picture, data)
    pending = orientation
    swaps = orientation >= FIRST_SIDEWAYS
    if isinstance(picture, TiffImagePlugin.TiffImageFile):
        pending = UPRIGHT  # Pillow turns a TIFF while loading it, and where the TIFF tag says so, reports that size
        swaps = swaps and picture.tag_v2.get(ExifTags.Base.Orientation) != orientation
    if swaps:
        width, height = height, width
    return PictureHeader(picture.format or "", width, height, picture.mode, pending)


def _check_decoding(picture: ImageFile.ImageFile, data: bytes, param: str) -> None:
    """BadRequest where the way in which the pixels are stored makes them far dearer than their number says."""
    if picture.tile and picture.tile[0].codec_name in Image.DECODERS and len(data) > MAX_SLOW_BYTES:
        kinds = "run-length BMP, plain PPM, PPM of other than 8 bits"
        raise BadRequest(f"pictures of this kind ({kinds}) may have at most {MAX_SLOW_BYTES} bytes here", param)
    if isinstance(picture, TiffImagePlugin.TiffImageFile):
        (width, height), tags = picture.size, picture.tag_v2
        across, down = tags.get(TiffImagePlugin.TILEWIDTH, width), tags.get(TiffImagePlugin.TILELENGTH, height)
        if not (isinstance(across, int) and isinstance(down, int) and min(across, down) > 0):
            raise BadRequest("the picture's tiles have no size", param)
        tiled = -(-width // across) * across * -(-height // down) * down
        if tiled > max(LEAST_TILED_PIXELS, MAX_TILED_SHARE * width * height):
            reason = f"tiles of {across} x {down} pixels are too large for a picture of {width} x {height}"
            raise BadRequest(reason, param)


def _orientation(picture: ImageFile.ImageFile, data: bytes) -> int:
    """The EXIF (or XMP) orientation, 1 where there is none or it makes no sense."""
    if isinstance(picture, PngImagePlugin.PngImageFile) and "exif" not in picture.info:
        late = _png_chunk(data, b"eXIf")  # it may follow the pixels; Pillow would decode them to get there
        if late is not None:
            picture.info["exif"] = b"Exif\0\0" + late
    if len(picture.info.get("exif") or b"") > MAX_EXIF_BYTES:
        return UPRIGHT
    value = Image.Image.getexif(picture).get(ExifTags.Base.Orientation, UPRIGHT)
    return value if isinstance(value, int) and value in ORIENTATIONS else UPRIGHT


def _png_chunk(data: bytes, kind: bytes) -> bytes | None:
    """Payload of the first chunk of `kind`, found by lengths alone (PNG, third edition, 5.3)."""
    at = PNG_SIGNATURE_BYTES
    while at + PNG_CHUNK_OVERHEAD_BYTES <= len(data):
        num_bytes = int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] == kind:
            return data[at + 8 : at + 8 + num_bytes]
        at += num_bytes + PNG_CHUNK_OVERHEAD_BYTES
    return None


def _flattened(picture: Image.Image, data: bytes) -> Image.Image:
    """8-bit RGB of a loaded picture of any mode, on white where it is transparent."""
    if picture.mode.startswith("I"):
        picture = _eight_bit_grey(picture)
    if picture.format == "PNG" and "transparency" in picture.info:
        picture.info["transparency"] = _scaled_key_colour(picture, data[PNG_BIT_DEPTH_AT])
    if not picture.has_transparency_data:
        return picture if picture.mode == "RGB" else picture.convert("RGB")
    rgba = picture if picture.mode == "RGBA" else picture.convert("RGBA")
    flat = Image.new("RGB", rgba.size, "white")
    flat.paste(rgba, mask=rgba.getchannel("A"))
    return flat


def _eight_bit_grey(picture: Image.Image) -> Image.Image:
    """16-bit grey to L or LA by its high byte, as Pillow itself does for 16-bit colour (its grey conversion clips)."""
    samples = np.asarray(picture)
    grey = Image.fromarray((samples >> 8).astype(np.uint8))
    key = picture.info.get("transparency")
    if isinstance(key, int):
        grey.putalpha(Image.fromarray(np.where(samples == key, 0, 255).astype(np.uint8)))
    return grey


def _scaled_key_colour(picture: Image.Image, bit_depth: int) -> int | bytes | tuple[int, ...]:
    """The PNG's transparent colour on the scale of the decoded samples; tRNS gives it on the file's scale."""
    key: int | bytes | tuple[int, ...] = picture.info["transparency"]
    if picture.mode == "L" and isinstance(key, int) and bit_depth < 8:
        return key * 255 // ((1 << bit_depth) - 1)
    if picture.mode == "RGB" and isinstance(key, tuple) and bit_depth == 16:
        return tuple(value >> 8 for value in key)
    return key
