"""Pictures of few pixels whose files make them dear: each is refused for what it says of itself, before it costs
anything. All are larger than what an encoder writes by far; what encoders write is served."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable

import pytest
from media_samples import LIMITS, encode, noise, peak_growth_bytes, plain, png_chunk

from prism_server.errors import BadRequest
from prism_server.media.image import MAX_SLOW_BYTES, decode, read_header
from prism_server.media.picture_file import MAX_PIECES, MAX_SCANS

PARAM = "messages[0].content[1]"


def check_refused(data: bytes, reason: str) -> None:
    for read in (read_header, decode):
        with pytest.raises(BadRequest, match=reason) as caught:
            read(data, LIMITS, PARAM)
        assert caught.value.param == PARAM


def check_served(data: bytes) -> None:
    header = read_header(data, LIMITS, PARAM)
    assert decode(data, LIMITS, PARAM).size == (header.width, header.height)


# -- JPEG ------------------------------------------------------------------------------------------------------------


def jpeg_of_scans(count: int) -> bytes:
    """The last scan again and again; each costs libjpeg as much as the whole picture."""
    data = encode(plain(128, mode="L"), "JPEG", progressive=True)
    at = data.rindex(b"\xff\xda")
    return data[:at] + data[at:-2] * (count - data[:at].count(b"\xff\xda")) + data[-2:]


def test_a_jpeg_has_an_end_of_scans() -> None:
    check_served(jpeg_of_scans(MAX_SCANS))
    check_refused(jpeg_of_scans(MAX_SCANS + 1), "more than 64 scans")


def test_scans_in_what_is_no_scan_do_not_count() -> None:
    """Thumbnails and whatever a camera hangs on behind the picture have some, too."""
    data = jpeg_of_scans(MAX_SCANS)
    note = b"\xff\xda\0\x02" * 200
    check_served(data[:2] + b"\xff\xe5" + struct.pack(">H", 2 + len(note)) + note + data[2:] + note)


@pytest.mark.parametrize(
    "stuffing",
    [b"\xff\xe5\0\x02" * (MAX_PIECES + 1), b"\xff" * 100_000, b"\xff\xd0" * 50_000, b"\xff\xd9" * (MAX_PIECES + 1)],
    ids=["segments", "filling", "restarts", "ends"],
)
def test_a_jpeg_has_an_end_of_its_head(stuffing: bytes) -> None:
    data = encode(plain("red"), "JPEG")
    check_refused(data[:2] + stuffing + data[2:], "more before its pixels")
    check_refused(data[:2] + stuffing, "more before its pixels")


def test_a_jpeg_of_many_metadata_is_served_up_to_megabytes() -> None:
    data = encode(noise(96, 64), "JPEG", progressive=True)
    segment = b"\xff\xe2\xff\xff" + b"\xff" * 65_533
    check_served(data[:2] + segment * 200 + data[2:])
    check_refused(data[:2] + segment * 300 + data[2:], "more before its pixels")


# -- PNG, GIF, PPM, BMP ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [33, -12], ids=["before the pixels", "behind them"])
@pytest.mark.parametrize("kind", [b"prVt", b"tEXt", b"IDAT"])
def test_a_png_has_an_end_of_chunks(place: int, kind: bytes) -> None:
    data = encode(plain("red"))
    check_refused(data[:place] + png_chunk(kind, b"") * (MAX_PIECES + 1) + data[place:], "more than 50000 chunks")


@pytest.mark.parametrize(
    "stuffing",
    [b"!\xfe" + b"\x01a" * 60_000 + b"\0", b"!\xfe\0" * 60_000, b"\0" * 60_000],
    ids=["block", "many", "none"],
)
def test_a_gif_has_an_end_of_what_comes_before_its_image(stuffing: bytes) -> None:
    data = encode(plain(3, mode="P"), "GIF")
    at = data.index(b"\x2c\0\0\0\0")
    check_served(data[:at] + b"!\xfe" + b"\xff" + b"a" * 255 + b"\0" + data[at:])
    check_refused(data[:at] + stuffing + data[at:], "before its first image")


def rle_bmp(body: bytes) -> bytes:
    """64 x 64 pixels, a byte each, in run lengths."""
    info = struct.pack("<IiiHHIIiiII", 40, 64, 64, 1, 8, 1, len(body), 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 54 + 1024 + len(body), 0, 0, 54 + 1024) + info + bytes(1024) + body


@pytest.mark.parametrize(
    "make",
    [
        lambda stuffing: rle_bmp(b"\0\2\0\0" * (stuffing // 4) + b"\x40\x05\0\0" * 64 + b"\0\1"),
        lambda stuffing: b"P3 64 64 255\n" + b"#\n" * (stuffing // 2) + b"5 " * (3 * 64 * 64),
        lambda stuffing: b"P6 64 64 100\n" + b"5" * (3 * 64 * 64 + stuffing),
    ],
    ids=["run-length BMP", "plain PPM", "PPM of few levels"],
)
def test_what_is_decoded_in_python_is_served_while_it_is_small(make: Callable[[int], bytes]) -> None:
    check_served(make(0))
    check_refused(make(MAX_SLOW_BYTES), "may have at most")


def test_a_ppm_has_an_end_of_its_head() -> None:
    head, pixels = b"P6 64 64 255\n", bytes(3 * 64 * 64)
    check_served(b"P6\n# a word\n64 64 # and another\n255\n" + pixels)
    check_refused(b"P6 #" + b"a" * 100_000 + b"\n" + head[3:] + pixels, "no head")
    check_refused(b"P6" + b" " * 100_000 + head[3:] + pixels, "no head")


# -- TIFF ------------------------------------------------------------------------------------------------------------


def tiff(side: int, tile: int, *more: tuple[int, int, int, int], order: str = "<") -> bytes:
    """A square of zeros in tiles of one size, all of them the same bytes; `more` tags: number, type, count, value."""
    num_tiles = (-(-side // tile)) ** 2
    pixels = zlib.compress(bytes(tile * tile), 9)
    fixed = [(256, 4, 1, side), (257, 4, 1, side), (258, 4, 1, 8), (259, 4, 1, 8), (262, 4, 1, 1), (277, 4, 1, 1)]
    tags = [*fixed, (322, 4, 1, tile), (323, 4, 1, tile), (324, 4, num_tiles, 0), (325, 4, num_tiles, 0), *more]
    at = 8 + 2 + 12 * len(tags) + 4
    values = {324: [at + 8 * num_tiles] * num_tiles, 325: [len(pixels)] * num_tiles}
    if num_tiles == 1:
        values = {324: [at], 325: [len(pixels)]}
    lists, entries = b"", b""
    for number, kind, count, value in sorted(tags):
        if number in values:
            value = values[number][0] if num_tiles == 1 else at + len(lists)
            lists += b"" if num_tiles == 1 else struct.pack(f"{order}{num_tiles}I", *values[number])
        entries += struct.pack(f"{order}HHII", number, kind, count, value)
    magic = (b"II*\0" if order == "<" else b"MM\0*") + struct.pack(f"{order}I", 8)
    return magic + struct.pack(f"{order}H", len(tags)) + entries + bytes(4) + lists + pixels


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_tiff_of_usual_tiles_is_served(order: str) -> None:
    for side, tile in ((100, 112), (300, 256), (100, 1024)):
        check_served(tiff(side, tile, order=order))


def test_a_tile_far_larger_than_the_picture_is_refused_without_the_memory() -> None:
    data = tiff(100, 12_000)  # 144 MB of zeros
    assert peak_growth_bytes(lambda: check_refused(data, "tiles of 12000 x 12000")) < 32 << 20


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_tiles_have_a_size() -> None:
    tag = struct.Struct("<HHII")
    for count, size in ((1, 0), (2, 8)):
        data = tiff(100, 112).replace(tag.pack(322, 4, 1, 112), tag.pack(322, 4, count, size))
        check_refused(data, "tiles|cannot be decoded")


@pytest.mark.parametrize("order", ["<", ">"])
def test_a_tiff_has_an_end_of_numbers_in_its_tags(order: str) -> None:
    check_served(tiff(64, 64, (700, 1, 4, 0), order=order))
    check_refused(tiff(64, 64, (60_000, 3, 1_000_001, 8), order=order), "numbers in its tags")


def test_a_big_tiff_has_an_end_of_tags() -> None:
    check_served(encode(plain("red"), "TIFF", big_tiff=True))
    check_refused(b"II+\0\x08\0\0\0" + struct.pack("<QQ", 16, 3_000_000) + bytes(1000), "tags")


# -- AVIF ------------------------------------------------------------------------------------------------------------


def box(name: bytes, body: bytes) -> bytes:
    return struct.pack(">I", 8 + len(body)) + name + body


def avif_of_items(count: int) -> bytes:
    """libavif looks for each item among all before it."""
    item = b"\x03\0\0\0" + bytes(6) + b"av01\0"
    items = b"".join(box(b"infe", item[:4] + struct.pack(">I", i + 1) + item[8:]) for i in range(count))
    about = box(b"hdlr", bytes(8) + b"pict" + bytes(13)) + box(b"pitm", b"\x01\0\0\0\0\0\0\x01")
    meta = box(b"meta", bytes(4) + about + box(b"iinf", b"\x01\0\0\0" + struct.pack(">I", count) + items))
    return box(b"ftyp", b"avif\0\0\0\0avifmif1miaf") + meta


def test_an_avif_has_an_end_of_items() -> None:
    check_refused(avif_of_items(10), "cannot be decoded")  # libavif's own word: they lead nowhere
    check_refused(avif_of_items(5000), "beside its pixels")


@pytest.mark.parametrize("name", [b"iloc", b"iref", b"ipma", b"moov"])
@pytest.mark.parametrize("size", [None, 0, 1])
def test_no_list_of_an_avif_is_long(name: bytes, size: int | None) -> None:
    long = box(name, bytes(70_000))
    if size is not None:
        long = struct.pack(">I", size) + long[4:]
    check_refused(encode(plain("red"), "AVIF") + long, "beside its pixels")


def test_an_avif_with_a_colour_profile_and_several_pictures_is_served() -> None:
    check_served(encode(noise(200, 100), "AVIF", icc_profile=bytes(1 << 20)))
    frames = [plain((shade, 0, 0)) for shade in range(20)]
    check_served(encode(frames[0], "AVIF", save_all=True, append_images=frames[1:]))
