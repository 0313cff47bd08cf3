"""Bodies in pieces: what came is what is read, whatever the network made of it."""

from __future__ import annotations

import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from prism_server.serving.exchange import LEAST_PIECE_BYTES, Body

SIZES = st.sampled_from(
    [0, 1, 7, LEAST_PIECE_BYTES - 1, LEAST_PIECE_BYTES, LEAST_PIECE_BYTES + 1, 3 * LEAST_PIECE_BYTES]
)


@given(st.lists(SIZES, max_size=12))
def test_a_body_is_its_pieces_in_order(sizes: list[int]) -> None:
    pieces = [bytes([i]) * size for i, size in enumerate(sizes)]
    body = Body()
    for piece in pieces:
        body.add(piece)
    assert body.take() == b"".join(pieces)


def test_a_body_is_let_go_when_it_is_taken() -> None:
    body = Body()
    body.add(b"once")
    assert body.take() == b"once"
    assert body.take() == b""


def test_a_body_of_crumbs_takes_little_more_room_than_its_bytes() -> None:
    body, num_crumbs = Body(), 50_000
    tracemalloc.start()
    try:
        for i in range(num_crumbs):
            body.add(i.to_bytes(2, "little"))
        used_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert used_bytes < 2 * (2 * num_crumbs + LEAST_PIECE_BYTES)
    assert len(body.take()) == 2 * num_crumbs
