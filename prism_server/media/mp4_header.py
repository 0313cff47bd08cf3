"""What an MP4 or MOV file says of itself: how many samples it claims, counted before FFmpeg makes an index of them.

FFmpeg writes some 40 bytes for every sample that a file claims, and again for every edit of its track. A file can claim
a hundred million in a few bytes: `stsz` with one size for all of them, `trun` without any (ISO/IEC 14496-12). Boxes are
looked for by name alone, because FFmpeg reads them wherever they are nested.
"""

from __future__ import annotations

from collections.abc import Iterator

from prism_server.errors import BadRequest

MAX_ENTRIES = 8_000_000
"""Of the index, over all tracks: some 300 MB. An hour at 120 frames a second, with sound, cut in ten: 6 million."""
MAX_METADATA_BYTES = 16 << 20
"""What is not the samples themselves: twice the tables of such a clip. Bounds the time that the search takes."""
MAX_TRACKS = 1000
MAX_BOXES = 1_000_000
"""At the top: an hour at 120 frames a second has fewer even in fragments of a frame. Bounds the time of the walk."""
HEADER_BYTES = 8
LARGE_HEADER_BYTES = 16
MATRIX_AT = (44, 56)
"""Bytes after where `tkhd` begins; the second in version 1, whose times are longer."""
CHUNK_SAMPLES = 1024
"""Of uncompressed sound, which FFmpeg takes in pieces of a chunk."""


def checked_metadata(data: bytes, param: str) -> bytes:
    """All but the samples. BadRequest for a file whose index would be larger than any clip's; damage is left alone."""
    about = all_but_samples(data, param)
    if b"cmov" in about:
        raise BadRequest("the clip has a compressed header, which is not supported", param)
    if about.count(b"trak") > MAX_TRACKS:
        raise BadRequest(f"the clip has more than {MAX_TRACKS} tracks", param)
    num_entries = sum(map(_num_entries, about.split(b"trak")))
    if num_entries > MAX_ENTRIES:
        raise BadRequest(f"the clip's header claims {num_entries} samples and edits; at most {MAX_ENTRIES}", param)
    return about


def is_mirrored(metadata: bytes) -> bool:
    """Whether the first track of pictures is to be shown as in a mirror, by the matrix of its `tkhd` (8.3.2).

    PyAV says how a frame is turned; asking it for the matrix itself keeps every frame until the garbage is collected.
    """
    for track in metadata.split(b"trak")[1:]:
        at = track.find(b"tkhd")
        if at < 0 or b"vide" not in _handlers(track) or len(track) < at + MATRIX_AT[1] + 36:
            continue
        matrix = at + MATRIX_AT[track[at + 4] == 1]
        a, b, _, c, d = (_signed(track, matrix + 4 * i) for i in range(5))
        return a * d < b * c
    return False


def all_but_samples(data: bytes, param: str) -> bytes:
    """All top-level boxes but those that hold the samples themselves. BadRequest where that is too much to look at."""
    about, at, num_boxes = bytearray(), 0, 0
    while at + HEADER_BYTES <= len(data):
        num_bytes = _number(data, at)
        if num_bytes == 1:
            num_bytes = int.from_bytes(data[at + HEADER_BYTES : at + LARGE_HEADER_BYTES], "big")
        if num_bytes < HEADER_BYTES:  # 0: up to the end
            num_bytes = len(data) - at
        if data[at + 4 : at + HEADER_BYTES] != b"mdat":
            about += data[at : at + num_bytes]
        at, num_boxes = at + num_bytes, num_boxes + 1
        if len(about) > MAX_METADATA_BYTES or num_boxes > MAX_BOXES:
            raise BadRequest("the file has more about its frames than an hour of them needs", param)
    return bytes(about)


def _num_entries(track: bytes) -> int:
    """What FFmpeg makes of one track: of what stands from its `trak` to the next."""
    num_samples = sum(_fields(track, b"stsz", 12)) + sum(_fields(track, b"stz2", 12))
    if _is_plain_sound(track):
        most_in_chunk = max(_chunk_samples(track), default=0)
        num_chunks = sum(_fields(track, b"stco", 8)) + sum(_fields(track, b"co64", 8))
        num_samples = max(num_samples, num_chunks * most_in_chunk) // CHUNK_SAMPLES + num_chunks
    num_edits = sum(min(count, len(track)) for count in _fields(track, b"elst", 8))
    return num_samples * max(1, num_edits) + sum(_fields(track, b"trun", 8))


def _is_plain_sound(track: bytes) -> bool:
    """A sample is a moment of uncompressed sound: millions of them are usual."""
    handlers = _handlers(track)
    runs = [*zip(_fields(track, b"stts", 8), _fields(track, b"stts", 16), strict=True)]
    return b"soun" in handlers and b"vide" not in handlers and runs == [(1, 1)] and track.count(b"stsc") == 1


def _handlers(track: bytes) -> set[bytes]:
    return {number.to_bytes(4, "big") for number in _fields(track, b"hdlr", 12)}


def _chunk_samples(track: bytes) -> Iterator[int]:
    at = track.find(b"stsc")
    while at >= 0:
        count = min(_number(track, at + 8), len(track) // 12)
        yield from (_number(track, at + 16 + 12 * entry) for entry in range(count))
        at = track.find(b"stsc", at + 1)


def _fields(track: bytes, name: bytes, offset: int) -> Iterator[int]:
    """The numbers `offset` bytes after where `name` begins, of every box of that name."""
    at = track.find(name)
    while at >= 0:
        yield _number(track, at + offset)
        at = track.find(name, at + 1)


def _number(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big")


def _signed(data: bytes, at: int) -> int:
    return int.from_bytes(data[at : at + 4], "big", signed=True)
