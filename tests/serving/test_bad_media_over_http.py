"""A bad item is a 4xx on its own request; the stream beside it loses no token."""

from __future__ import annotations

import base64
import struct
import threading
import urllib.parse
import zlib
from typing import Any

import pytest
from PIL import Image
from serving_support import ServerProcess, chat_body, data_url, encoded, image_part, noise, sse_events, url_part

PICTURE = noise(11)
BASE64 = base64.b64encode(PICTURE).decode()
PLACE = "messages[0].content[0].image_url.url"


def bilevel_png(side: int) -> bytes:
    """A black picture of side x side pixels in some kilobytes."""

    def chunk(kind: bytes, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((side + 7) // 8 + 1) * side, 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def half_a_jpeg() -> bytes:
    data = encoded(Image.effect_noise((256, 256), 64).convert("RGB"), "JPEG")
    return data[: len(data) // 2]


BAD = {
    "empty payload": url_part("data:image/png;base64,"),
    "empty url": url_part(""),
    "no comma": url_part("data:image/png;base64"),
    "not base64": url_part("data:image/png;base64,@@@@"),
    "base64 cut": url_part("data:image/png;base64," + BASE64[:101]),
    "a text file named .png": image_part(b"this is text, whatever its name"),
    "half a JPEG": url_part(data_url(half_a_jpeg(), "image/jpeg")),
    "half a PNG": image_part(PICTURE[: len(PICTURE) // 2]),
    "13000 x 13000": image_part(bilevel_png(13_000)),
    "14000 x 14000": image_part(bilevel_png(14_000)),
    "ratio above 200": image_part(encoded(Image.new("RGB", (201, 1)))),
    "a link": url_part("https://example.org/cat.png"),
    "a path": url_part("/etc/passwd"),
    "a file link": url_part("file:///etc/passwd"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_picture_is_a_400_before_any_header_with_param_and_reason(
    server: ServerProcess, name: str, stream: bool
) -> None:
    answer = server.chat(BAD[name], "What is it?", stream=stream)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == PLACE
    assert len(error["message"]) > 10
    assert server.http.get(f"{server.api}/readyz").status_code == 200


GOOD = {
    "capitals": f"DATA:IMAGE/PNG;BASE64,{BASE64}",
    "charset": f"data:image/png;charset=utf-8;base64,{BASE64}",
    "missing media type": f"data:;base64,{BASE64}",
    "unpadded": f"data:image/png;base64,{BASE64.rstrip('=')}",
    "line breaks": "data:image/png;base64," + "\r\n".join(BASE64[i : i + 76] for i in range(0, len(BASE64), 76)),
    "url-safe alphabet": "data:image/png;base64," + BASE64.replace("+", "-").replace("/", "_"),
    "percent encoding": "data:image/png," + urllib.parse.quote_from_bytes(PICTURE),
}


@pytest.mark.parametrize("name", GOOD)
def test_every_spelling_of_a_data_url_is_the_same_picture(server: ServerProcess, name: str) -> None:
    expected = server.chat(image_part(PICTURE), "What is it?").json()
    answer = server.chat(url_part(GOOD[name]), "What is it?").json()
    assert answer["choices"][0]["message"] == expected["choices"][0]["message"]
    assert answer["prism"]["decoded_items"] == answer["prism"]["prefilled_media_tokens"] == 0


@pytest.mark.parametrize("size", [(1, 1), (27, 300), (31, 32), (200, 1)])
def test_odd_sizes_are_served(server: ServerProcess, size: tuple[int, int]) -> None:
    answer = server.chat(image_part(encoded(Image.new("RGB", size, "red"))), "What is it?", max_tokens=2)
    assert answer.status_code == 200, answer.text


def test_a_bad_item_is_a_4xx_on_its_own_request_the_stream_beside_it_loses_no_token(server: ServerProcess) -> None:
    # Of this answer no token is nearly as likely as another: it is the same in batches of any size.
    body = chat_body("Describe the picture.", image_part(noise(14)), max_tokens=150, ignore_eos=True, stream=True)

    def stream() -> list[Any]:
        with server.http.stream("POST", f"{server.api}/v1/chat/completions", json=body) as response:
            return [
                choice["delta"].get("content")
                for _, chunk in sse_events(response)
                if chunk != "[DONE]"
                for choice in chunk["choices"]
            ]

    alone = stream()
    beside: list[list[Any]] = []
    threads = [threading.Thread(target=lambda: beside.append(stream())) for _ in range(2)]
    for thread in threads:
        thread.start()
    refused = [server.chat(part, "What is it?").status_code for part in BAD.values()]
    for thread in threads:
        thread.join()
    assert refused == [400] * len(BAD)
    assert ["".join(filter(None, pieces)) for pieces in beside] == ["".join(filter(None, alone))] * 2


def test_user_text_that_spells_control_tokens_is_text(server: ServerProcess) -> None:
    plain = server.chat("a", max_tokens=1).json()["usage"]["prompt_tokens"]
    for token in ("<|image_pad|>", "<|im_start|>", "<|vision_start|>"):
        answer = server.chat(token, max_tokens=1)
        assert answer.status_code == 200
        assert answer.json()["usage"]["prompt_tokens"] > plain + 1
