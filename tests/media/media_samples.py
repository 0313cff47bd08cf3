"""Pictures made in code, and the small processor that the tests of media run with."""

from __future__ import annotations

import ctypes
import io
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from prism_server.media.item import MediaItem
from prism_server.media.limits import MediaLimits
from prism_server.media.pipeline import MediaPipeline
from prism_server.media.processor_config import ImageProcessorConfig, PixelRange

LIMITS = MediaLimits(max_items=64, max_item_bytes=1 << 20, max_decoded_pixels=100_000_000)
CONFIG = ImageProcessorConfig(16, 2, 2, PixelRange(4096, 147456), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


def encode(picture: Image.Image, fmt: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    picture.save(out, fmt, **options)
    return out.getvalue()


def noise(width: int, height: int, seed: int = 0) -> Image.Image:
    """RGB noise over a gradient: every pixel matters and JPEG stays honest."""
    rng = np.random.default_rng(seed)
    ramp = np.linspace(0, 160, width, dtype=np.float64)[None, :, None]
    return Image.fromarray((ramp + rng.integers(0, 96, (height, width, 3))).astype(np.uint8))


def plain(colour: Any, width: int = 64, height: int = 64, mode: str = "RGB") -> Image.Image:
    return Image.new(mode, (width, height), colour)


def item(data: bytes, **options: Any) -> MediaItem:
    return MediaItem("image", data, **options)


def make_pipeline(
    config: ImageProcessorConfig = CONFIG,
    limits: MediaLimits = LIMITS,
    workers: int = 2,
    cache_bytes: int = 1 << 20,
    facts_items: int = 1000,
) -> MediaPipeline:
    return MediaPipeline(config, limits, workers, cache_bytes, facts_items)


def png_chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def png_with(data: bytes, chunk: bytes, before: bytes) -> bytes:
    """The PNG with one more chunk in front of the first chunk of the type `before`."""
    at = data.index(before) - 4
    return data[:at] + chunk + data[at:]


def png_of_zeros(width: int, height: int) -> bytes:
    """A 1-bit PNG made without its pixels ever being in memory: some 20 KB for 13,000 x 13,000."""
    packer, row, packed = zlib.compressobj(9), bytes(1 + (width + 7) // 8), bytearray()
    for _ in range(height):
        packed += packer.compress(row)
    packed += packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    chunks = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", bytes(packed)) + png_chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def exif_orientation(value: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = value
    return exif.tobytes()


def peak_growth_bytes(call: Callable[[], object]) -> int:
    """How far the process's resident memory rises above its present size while `call` runs (Linux)."""
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator keeps for itself would be filled first, unseen
    Path("/proc/self/clear_refs").write_text("5")  # sets the high-water mark back to the present size
    before_kib = _status_kib("VmHWM")
    call()
    return (_status_kib("VmHWM") - before_kib) * 1024


def _status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
