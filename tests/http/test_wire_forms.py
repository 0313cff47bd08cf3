"""What router and engines have in common on the wire: bodies within bounds, request ids, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from prism_server.errors import BadRequest, EngineFault, Overloaded, PrismError
from prism_server.http.asgi import ClientLeft, read_body
from prism_server.http.error_body import error_headers, error_json, error_object
from prism_server.http.headers import request_id_of

MAX_BYTES = 3
LEAVES = {"type": "http.disconnect"}


def body_of(*chunks: bytes, leaves: bool = False, length: str | None = None) -> bytes:
    """What is read of a body in chunks; afterwards the client stays, or it leaves before the end."""
    last = len(chunks) - 1
    pieces = [
        {"type": "http.request", "body": chunk, "more_body": leaves or i < last} for i, chunk in enumerate(chunks)
    ]
    messages = iter([*pieces, LEAVES])
    scope = {"headers": [] if length is None else [(b"content-length", length.encode())]}
    body = bytearray()

    async def receive() -> Any:
        return next(messages)

    asyncio.run(read_body(scope, receive, MAX_BYTES, body.extend))
    return bytes(body)


def test_a_body_is_its_chunks() -> None:
    assert body_of(b"ab", b"", b"c") == b"abc"
    assert body_of(b"abc", length="3") == b"abc"


@pytest.mark.parametrize(("chunks", "length"), [((), "4"), ((b"abc", b"d"), None), ((b"abcd",), "no number")])
def test_a_body_beyond_the_cap_is_a_413_as_soon_as_it_shows(chunks: tuple[bytes, ...], length: str | None) -> None:
    """Declared: before a byte is read. The client leaves after that, which nobody gets to see."""
    with pytest.raises(BadRequest) as caught:
        body_of(*chunks, leaves=True, length=length)
    assert (caught.value.status, caught.value.code) == (413, "body_too_large")


def test_a_client_that_leaves_in_its_body_is_told_apart() -> None:
    with pytest.raises(ClientLeft):
        body_of(b"ab", leaves=True)


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [(b"abc-1", True), (b"x" * 128, True), (b"x" * 129, False), (b"a\x00", False), (b"\xe4", False), (None, False)],
)
def test_a_request_id_is_the_clients_where_that_is_harmless(given: bytes | None, is_kept: bool) -> None:
    assert (request_id_of(given) == given) == is_kept


def test_request_ids_that_are_made_differ() -> None:
    assert request_id_of(b"") != request_id_of(b"")


@pytest.mark.parametrize(
    ("error", "type_", "param", "code"),
    [
        (BadRequest("why", "top_k", code="odd"), "invalid_request_error", "top_k", "odd"),
        (Overloaded("why"), "overloaded_error", None, None),
        (PrismError("why"), "internal_error", None, None),
    ],
)
def test_every_error_has_the_same_four_fields(
    error: PrismError, type_: str, param: str | None, code: str | None
) -> None:
    expected = {"error": {"message": "why", "type": type_, "param": param, "code": code}}
    assert error_object(error) == expected
    assert json.loads(error_json(error)) == expected


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (BadRequest("why"), []),
        (PrismError("why"), []),
        (Overloaded("why", 7), [(b"retry-after", b"7")]),
        (EngineFault("why"), [(b"retry-after", b"1")]),
        (BadRequest("why", status=401), [(b"www-authenticate", b"Bearer")]),
    ],
)
def test_an_error_says_in_its_head_what_the_client_can_do(
    error: PrismError, expected: list[tuple[bytes, bytes]]
) -> None:
    assert error_headers(error) == expected
