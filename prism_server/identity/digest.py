"""Length-framed, tagged SHA-256: the only way Prism makes a key."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

Digest = bytes
"""32 bytes of SHA-256. Nothing shorter, and nothing perceptual, ever selects KV."""

KEY_VERSION = 1
"""Raised whenever any key below is computed differently; router and engines of two versions expect no hits."""

Field = bytes | memoryview | str | int | bool | None


def _framed(field: Field) -> tuple[bytes, bytes | memoryview]:
    """A field's type mark and its bytes, so that `1`, `"1"`, `True` and `None` differ. Long bytes are not copied."""
    match field:
        case None:
            return b"n", b""
        case bool():
            return b"b", b"1" if field else b"0"
        case int():
            return b"i", str(field).encode()
        case str():
            return b"s", field.encode("utf-8", "surrogatepass")
        case _:
            return b"x", field


def framed_digest(tag: str, fields: Iterable[Field]) -> Digest:
    """SHA-256 over tag, key version and fields, each after its mark and its length: no concatenation is ambiguous."""
    hasher = hashlib.sha256()
    for field in (tag, KEY_VERSION, *fields):
        mark, payload = _framed(field)
        hasher.update(mark + len(payload).to_bytes(8, "little"))
        hasher.update(payload)
    return hasher.digest()
