"""Vectors that pin every key. A change here empties every cache and needs a higher KEY_VERSION."""

from __future__ import annotations

import hashlib

import numpy as np

from prism_server.identity import (
    KEY_VERSION,
    MediaOptions,
    MediaPart,
    PageSpan,
    TextPart,
    cache_seed,
    content_id,
    framed_digest,
    layout_digest,
    media_chain_keys,
    namespace_digest,
    page_key,
)

SEED = bytes(range(32))


def test_golden_digest_is_sha256_of_marked_and_length_framed_fields() -> None:
    """The framing itself, written out by hand."""

    def framed(mark: bytes, payload: bytes) -> bytes:
        return mark + len(payload).to_bytes(8, "little") + payload

    expected = hashlib.sha256(
        framed(b"s", b"tag")
        + framed(b"i", str(KEY_VERSION).encode())
        + framed(b"x", b"\x00\x01")
        + framed(b"s", "é".encode())
        + framed(b"i", b"-7")
        + framed(b"b", b"1")
        + framed(b"n", b"")
    )
    assert framed_digest("tag", [b"\x00\x01", "é", -7, True, None]) == expected.digest()


def test_golden_keys() -> None:
    options = MediaOptions(min_pixels=None, max_pixels=1_000_000)
    parts = [
        TextPart("system", "Be brief."),
        TextPart("user", "Look: 你好"),
        MediaPart("user", "image", SEED, options),
        TextPart("user", ""),
        MediaPart("user", "image", SEED),
        TextPart("user", "and?"),
    ]
    spans = [PageSpan(0, 3, SEED, b"\x01" * 32, 7), PageSpan(4, 2, SEED, b"\x02" * 32, 0)]
    tokens = np.array([0, 1, -1, 151_655, 2**31 - 1, 5, 6, 7], dtype=np.int32)
    found = {
        "content": content_id("image", b"\x89PNG"),
        "layout": layout_digest("image", {"patch": 16, "background": "white", "min_pixels": None, "scale": True}),
        "namespace": namespace_digest("Qwen/Qwen3-VL-8B-Instruct", "main", "fp8", "fingerprint"),
        "seed": cache_seed(SEED, None),
        "seed with salt": cache_seed(SEED, "alice"),
        "page": page_key(SEED, tokens, []),
        "page with spans": page_key(SEED, tokens, spans),
        **{f"media {i}": key for i, key in enumerate(media_chain_keys(SEED, parts))},
    }
    assert {name: key.hex() for name, key in found.items()} == GOLDEN


GOLDEN = {
    "content": "1d926e9656aed29f9f5f7d169563514260801cd3066edb6d5940af6e5f6c15bb",
    "layout": "3a5adfbcd50e47133b764cb120775c425f6ec1e1af74d54bbf053ceefc50ce82",
    "namespace": "ba0b8a648a155673686404e7cd8b47ab80676f007a0ac87f2664b6bb42d3a56f",
    "seed": "44c20d1b7ab2cd0f11b526096f9230687d7443d589555160ad68209e7a85e60e",
    "seed with salt": "d8e7667c47baca5e56e259642797bfc1e3972fcaa702c07b5c59c6d5d7b7607c",
    "page": "2bcb7e8409605546791cda8a09ded52cd318a54466c9e7efb24fa760b819c4c2",
    "page with spans": "c5730056d5c62380748463dc6811c6fa7135ab5d32edb3023cf724725293ff7f",
    "media 0": "838471ce0f513ae6f0cbe5903c25629324cc42b0428bf22472fb41daa8182dfc",
    "media 1": "a5e02de8051a2081aebd59ca78dcece482f615bcfe1405991f4ef2ee7427f8f5",
}
