"""What a picture's file says of its own making, looked at before Pillow reads it.

Limits of pixels bound what a picture is. How it is written can cost far more than that: a JPEG goes over all of its
pixels once a scan, a scan takes 60 bytes and libjpeg counts none; Pillow's plugins read pieces of a head one by one, in
Python; libavif looks for every item among all others, and nothing else runs in the process meanwhile.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator, Mapping

from prism_server.errors import BadRequest
from prism_server.media.mp4_header import all_but_samples

MAX_PIECES = 50_000
"""Segments, chunks and blocks: a quarter of a second. PNG of 64 MiB have 8,000 chunks, or twice as many."""
MAX_HEAD_BYTES = 16 << 20
"""Before a JPEG's pixels: colour profiles and depth maps take some megabytes."""
MAX_STRAY_BYTES = 1 << 16
"""Between pieces."""
MAX_SCANS = 64
"""Of a progressive JPEG. Usual encoders make 10, those that look for the smallest file some more."""
MAX_NUMBERS = 1_000_000
"""In the tags of a TIFF: it has a strip a row at most, and two numbers a strip."""
MAX_TIFF_TAGS = 65_535
MAX_PPM_HEAD_BYTES = 1 << 16
MAX_AVIF_HEAD_BYTES = 4 << 20
"""All but the coded pixels: the head itself is a few kilobytes, a colour profile may be in it."""
MAX_AVIF_LIST_BYTES = 1 << 16
"""Of its lists of items together: 256 tiles need 12 KB."""
COUNTED_BYTES = 1 << 18
"""At a time: other threads run in between."""
TOO_MUCH_HEAD = "has more before its pixels than any picture needs"

JPEG_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
JPEG_START_OF_SCAN, JPEG_END = 0xDA, 0xD9
JPEG_SCAN = b"\xff\xda"
JPEG_WITHOUT_LENGTH = (0x01, 0xD8, JPEG_END)
PNG_FIRST_CHUNK_AT, PNG_CHUNK_OVERHEAD_BYTES = 8, 12
GIF_SCREEN_BYTES, GIF_EXTENSION, GIF_IMAGE = 13, 0x21, 0x2C
TIFF_BYTE_TYPES = (1, 2, 6, 7)
"""BYTE, ASCII, SBYTE, UNDEFINED: stay bytes."""
PPM_COMMENT = re.compile(rb"#[^\r\n]*")
AVIF_LISTS = (b"iinf", b"iloc", b"iref", b"ipma", b"moov")


def check_file(format_name: str, data: bytes, param: str) -> None:
    """BadRequest for a picture of Pillow's format of that name that is written as no encoder does. Damage is left to
    those who decode it."""
    check = CHECKS.get(format_name)
    reason = check(data, param) if check else None
    if reason is not None:
        raise BadRequest(f"the picture {reason}", param)


def _jpeg(data: bytes, _: str) -> str | None:
    at, num_pieces, num_stray, num_scans = 2, 0, 0, 0
    has_few_scans = _has_few_scans(data)
    while (found := JPEG_MARKER.search(data, at)) is not None:
        marker, num_pieces = data[found.end() - 1], num_pieces + 1
        if not num_scans:
            num_stray += found.start() - at
        if num_pieces > MAX_PIECES or num_stray > MAX_STRAY_BYTES or (at > MAX_HEAD_BYTES and not num_scans):
            return TOO_MUCH_HEAD
        num_scans += marker == JPEG_START_OF_SCAN
        if num_scans > MAX_SCANS:
            return f"has more than {MAX_SCANS} scans"
        if num_scans and (has_few_scans or marker == JPEG_END):
            return None
        at = found.end()
        if marker not in JPEG_WITHOUT_LENGTH:
            at += int.from_bytes(data[at : at + 2], "big")
    return TOO_MUCH_HEAD if not num_scans and len(data) - at > MAX_STRAY_BYTES else None


def _has_few_scans(data: bytes) -> bool:
    """Sure without a look at what is what: nearly every JPEG."""
    pieces = range(0, len(data), COUNTED_BYTES)
    return sum(data.count(JPEG_SCAN, at, at + COUNTED_BYTES + 1) for at in pieces) <= MAX_SCANS


def _png(data: bytes, _: str) -> str | None:
    at = PNG_FIRST_CHUNK_AT
    for _piece in range(MAX_PIECES):
        if at + PNG_CHUNK_OVERHEAD_BYTES > len(data) or data[at + 4 : at + 8] == b"IEND":
            return None
        at += int.from_bytes(data[at : at + 4], "big") + PNG_CHUNK_OVERHEAD_BYTES
    return f"has more than {MAX_PIECES} chunks"


def _gif(data: bytes, _: str) -> str | None:
    """Up to the first image. Blocks that are none are passed over byte by byte, as Pillow does."""
    at, in_extension = GIF_SCREEN_BYTES, False
    if len(data) >= GIF_SCREEN_BYTES and data[10] & 0x80:
        at += 3 << ((data[10] & 7) + 1)
    for _piece in range(MAX_PIECES):
        if at >= len(data) or (not in_extension and data[at] == GIF_IMAGE):
            return None
        if in_extension:
            in_extension = data[at] > 0
            at += 1 + data[at]
        else:
            in_extension = data[at] == GIF_EXTENSION
            at += 2 if in_extension else 1
    return f"has more than {MAX_PIECES} blocks before its first image"


def _tiff(data: bytes, _: str) -> str | None:
    order = "<" if data[:2] == b"II" else ">"
    is_big = b"+" in data[2:4]
    try:
        (start,) = struct.unpack_from(f"{order}Q" if is_big else f"{order}I", data, 8 if is_big else 4)
        (num_tags,) = struct.unpack_from(f"{order}Q" if is_big else f"{order}H", data, start)
    except (struct.error, OverflowError):
        return None
    if num_tags > MAX_TIFF_TAGS:
        return f"has more than {MAX_TIFF_TAGS} tags"
    one_tag = struct.Struct(f"{order}HHQ8x" if is_big else f"{order}HHI4x")
    first = start + (8 if is_big else 2)
    num_there = min(num_tags, (len(data) - first) // one_tag.size)
    tags = one_tag.iter_unpack(data[first : first + num_there * one_tag.size])
    if sum(count for _tag, kind, count in tags if kind not in TIFF_BYTE_TYPES) > MAX_NUMBERS:
        return f"has more than {MAX_NUMBERS} numbers in its tags"
    return None


def _ppm(data: bytes, _: str) -> str | None:
    """Pillow reads the head byte by byte, comments too."""
    num_words = 2 if data[1:2] in b"14" else 3
    words = PPM_COMMENT.sub(b"", data[2:MAX_PPM_HEAD_BYTES]).split(None, num_words)
    return None if len(words) >= num_words else "has no head, or one that does not end"


def _avif(data: bytes, param: str) -> str | None:
    head = all_but_samples(data, param)
    if len(head) > MAX_AVIF_HEAD_BYTES or sum(_box_sizes(head)) > MAX_AVIF_LIST_BYTES:
        return "has more beside its pixels than any picture needs"
    return None


def _box_sizes(head: bytes) -> Iterator[int]:
    """Bytes of every list, wherever it is; 0 and 1, for "to the end" and 64 bits, are as much as there can be."""
    for name in AVIF_LISTS:
        at = head.find(name)
        while at >= 4:
            num_bytes = int.from_bytes(head[at - 4 : at], "big")
            yield num_bytes if num_bytes > 1 else len(head) - at
            at = head.find(name, at + 1)


CHECKS: Mapping[str, Callable[[bytes, str], str | None]] = {
    "JPEG": _jpeg,
    "PNG": _png,
    "GIF": _gif,
    "TIFF": _tiff,
    "PPM": _ppm,
    "AVIF": _avif,
}
