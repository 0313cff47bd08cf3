"""MP4 and MOV files that claim more than they hold: refused from a few bytes, before a table is made of them."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from fractions import Fraction

import av
import numpy as np
import pytest
from clip_making import clip_file, numbered
from clip_samples import clip, clip_pipeline
from media_samples import peak_growth_bytes

from prism_server.errors import BadRequest
from prism_server.media.mp4_header import MAX_ENTRIES, checked_metadata, is_mirrored

FRAGMENTED = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
MANY = 80_000_000
"""Samples that FFmpeg would take 3 GB for."""


def patched(data: bytes, name: bytes, offset: int, *numbers: int) -> bytes:
    """With `numbers` in place of what stands `offset` bytes after where the first box's `name` begins."""
    at = data.index(name) + offset
    return data[:at] + struct.pack(f">{len(numbers)}I", *numbers) + data[at + 4 * len(numbers) :]


def of_one_size(num_samples: int) -> bytes:
    """All samples of one byte, in one chunk, of one duration, all of them keys."""
    data = clip_file(numbered(30))
    data = patched(data, b"stsz", 8, 1, num_samples)
    data = patched(data, b"stsc", 8, 1, 1, num_samples, 1)
    data = patched(data, b"stts", 8, 1, num_samples, 1)
    return data.replace(b"ctts", b"free").replace(b"stss", b"free")


def in_a_fragment(num_samples: int) -> bytes:
    return patched(clip_file(numbered(30), container_options=FRAGMENTED), b"trun", 4, 1, num_samples)


def with_edits(num_edits: int, num_samples: int) -> bytes:
    """Each edit shows all of it; the box grows, and what holds it."""
    data = of_one_size(num_samples)
    at = data.index(b"elst") - 4
    edits = struct.pack(">II", 0, num_edits) + struct.pack(">IIHH", 3000, 0, 1, 0) * num_edits
    added = len(edits) + 8 - int.from_bytes(data[at : at + 4], "big")
    data = data[:at] + struct.pack(">I", len(edits) + 8) + b"elst" + edits + data[at + 28 :]
    for name in (b"edts", b"trak", b"moov"):
        at = data.index(name) - 4
        data = patched(data, name, -4, int.from_bytes(data[at : at + 4], "big") + added)
    return data


CLAIMS: dict[str, Callable[[], bytes]] = {
    "samples of one size": lambda: of_one_size(MANY),
    "samples of a fragment": lambda: in_a_fragment(MANY),
    "edits": lambda: with_edits(1000, 10_000),
    "two tracks": lambda: of_one_size(MAX_ENTRIES // 2 + 1) + of_one_size(MAX_ENTRIES // 2)[40:],
}


@pytest.mark.parametrize("name", CLAIMS)
def test_a_small_file_that_claims_millions_of_samples_is_refused_without_the_memory(name: str) -> None:
    data = CLAIMS[name]()
    assert len(data) < 20_000
    pipeline = clip_pipeline()
    pipeline.describe(clip(clip_file(numbered(4))))  # everything is loaded

    def refused() -> None:
        with pytest.raises(BadRequest, match=r"claims \d+ samples and edits; at most 8000000"):
            pipeline.describe(clip(data))

    assert peak_growth_bytes(refused) < 16 << 20
    pipeline.close()


def test_what_is_nested_or_packed_where_it_does_not_belong_is_found_too() -> None:
    whole = of_one_size(MANY)
    moov = whole[whole.index(b"moov") - 4 :]
    for hidden in (moov, struct.pack(">I", 8 + len(moov)) + b"free" + moov, b"\0\0\0\0uuid" + moov):
        with pytest.raises(BadRequest, match="claims"):
            checked_metadata(whole[: len(whole) - len(moov)] + hidden, "messages")
    with pytest.raises(BadRequest, match="compressed header"):
        checked_metadata(whole.replace(b"mvhd", b"cmov"), "messages")


def test_files_with_endless_boxes_are_refused_before_they_are_searched() -> None:
    box = struct.pack(">I", 8)
    for data in (struct.pack(">I", 20 << 20) + b"free" + bytes(20 << 20), (box + b"mdat") * 1_000_001):
        with pytest.raises(BadRequest, match="more about its frames"):
            checked_metadata(data, "messages")
    with pytest.raises(BadRequest, match="more than 1000 tracks"):
        checked_metadata(struct.pack(">I", 8 << 20) + b"moov" + b"trak" * 1001, "messages")


@pytest.mark.parametrize(
    "data",
    [b"", b"\0\0\0\x01ftyp", b"\0\0\0\x01ftyp" + bytes(8), b"\xff\xff\xff\xffmoov", b"\0\0\0\x14moovstsz", b"trunelst"],
)
def test_damage_is_left_to_the_decoder(data: bytes) -> None:
    assert not is_mirrored(checked_metadata(data, "messages"))


def track(kind: bytes, a: int, b: int, c: int, d: int, version: int = 0) -> bytes:
    matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    header = b"tkhd" + bytes([version]) + bytes(51 if version else 39) + matrix + bytes(8)
    return b"trak" + header + b"hdlr" + bytes(8) + kind + bytes(12)


def test_the_matrix_of_the_first_track_of_pictures_says_whether_it_is_mirrored() -> None:
    for version in (0, 1):
        assert is_mirrored(b"moov" + track(b"vide", -1, 0, 0, 1, version))
        assert is_mirrored(b"moov" + track(b"vide", 0, 1, 1, 0, version))
        assert not is_mirrored(b"moov" + track(b"vide", 0, -1, 1, 0, version))
    upright, mirrored, sound = track(b"vide", 1, 0, 0, 1), track(b"vide", 1, 0, 0, -1), track(b"soun", -1, 0, 0, 1)
    assert is_mirrored(b"moov" + sound + mirrored + upright)
    assert not is_mirrored(b"moov" + sound + upright + mirrored)
    assert not is_mirrored(b"moov" + mirrored[:60])


def with_plain_sound(seconds: int) -> bytes:
    """A frame, and uncompressed sound at 96,000 samples a second."""
    out = io.BytesIO()
    with av.open(out, "w", format="mov") as container:
        pictures = container.add_stream("mpeg4", rate=10)
        pictures.width, pictures.height, pictures.pix_fmt = 96, 64, "yuv420p"
        sound = container.add_stream("pcm_u8", rate=96_000, layout="mono")
        shown = av.VideoFrame.from_ndarray(numbered(1)[0], format="rgb24")
        shown.pts, shown.time_base = 0, Fraction(1, 10)
        container.mux([*pictures.encode(shown), *pictures.encode()])
        for second in range(seconds):
            heard = av.AudioFrame.from_ndarray(np.zeros((1, 96_000), dtype=np.uint8), "u8", "mono")
            heard.sample_rate, heard.pts = 96_000, 96_000 * second
            container.mux(sound.encode(heard))
        container.mux(sound.encode())
    return out.getvalue()


def test_uncompressed_sound_has_millions_of_samples_and_is_no_matter() -> None:
    data = with_plain_sound(100)
    assert b"soun" in data
    checked_metadata(data, "messages")
    pipeline = clip_pipeline()
    assert pipeline.describe(clip(data)).grid[0] == 1
    pipeline.close()
    at = data.index(b"stsc", data.index(b"soun"))
    many = data[: at + 4] + b"stsc" * 100_000 + data[at + 4 :]  # each of which could be a table of all that follows
    with pytest.raises(BadRequest, match="claims"):
        checked_metadata(many, "messages")
    lying = data[: at + 16] + struct.pack(">I", 4_000_000_000) + data[at + 20 :]  # samples in a chunk
    with pytest.raises(BadRequest, match="claims"):
        checked_metadata(lying, "messages")
