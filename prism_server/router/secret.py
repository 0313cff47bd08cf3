"""The token of admin listeners: one file, read anew for each use, since Secrets change under a running process."""

from __future__ import annotations

import hmac
from pathlib import Path

from prism_server.errors import BadRequest


def tokens_in(file: Path) -> list[bytes]:
    """The file's lines without comments; the first is the one to send. Empty while it cannot be read."""
    try:
        lines = [line.strip() for line in file.read_bytes().splitlines()]
    except OSError:
        return []
    return [line for line in lines if line and not line.startswith(b"#")]


def bearer(file: Path | None) -> list[tuple[bytes, bytes]]:
    """The header that shows the token, if there is one to show."""
    tokens = tokens_in(file) if file is not None else []
    return [(b"authorization", b"Bearer " + tokens[0])] if tokens else []


def check_token(file: Path | None, authorization: bytes | None) -> None:
    """Raises a 401 unless the header shows one of the file's tokens, or no file is configured."""
    if file is None:
        return
    scheme, _, given = (authorization or b"").partition(b" ")
    matches = [hmac.compare_digest(given.strip(), token) for token in tokens_in(file)]
    if scheme.lower() != b"bearer" or not any(matches):
        raise BadRequest("a valid token is needed: Authorization: Bearer TOKEN", status=401, code="invalid_token")
