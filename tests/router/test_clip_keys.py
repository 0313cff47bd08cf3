"""Clips in the router: the engine's keys without a decoder, a size for each, and the same home whatever is asked."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from clip_making import clip_file, numbered, png

from prism_server.demo_model import checkpoint_dir
from prism_server.identity import KEY_VERSION, content_id, frames_id, link_digest, namespace_digest
from prism_server.media.pipeline import MediaPipeline
from prism_server.prompt.encoder import PromptEncoder
from prism_server.prompt.template import ChatTemplate
from prism_server.prompt.tokenizer import Tokenizer
from prism_server.router.media_size import USUAL, MediaSizer
from prism_server.router.pods import KeyScheme
from prism_server.router.request_keys import RequestKeys, read_request
from prism_server.serving.early_media import take_media_out
from prism_server.serving.prepare import Preparer
from prism_server.serving.schema import ChatRequest, parse_body
from prism_server.settings import MediaSettings, ServerSettings

NAMESPACE = namespace_digest("model", "", "fp8", "processor")
SCHEME = KeyScheme(KEY_VERSION, NAMESPACE, "layout")
PATH = "/v1/chat/completions"
FILE = clip_file(numbered(8), 2)
FRAMES = [png(frame) for frame in numbered(6, 320, 240)]
LINK = "https://example.org/clip.mp4"


def url(data: bytes, media_type: str = "video/mp4") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def file(data: bytes = FILE, **options: Any) -> dict[str, Any]:
    return {"type": "video_url", "video_url": {"url": url(data), **options}}


def frames(fps: float = 2, **options: Any) -> dict[str, Any]:
    return {"type": "video", "video": [url(frame, "image/png") for frame in FRAMES], "fps": fps, **options}


def picture() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url(FRAMES[0], "image/png")}}


def body(*parts: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": list(parts)}]}).encode()


def keys(*parts: Any) -> RequestKeys:
    return read_request(PATH, body(*parts), (SCHEME,), MediaSizer())


@pytest.fixture(scope="module")
def preparer() -> Iterator[Preparer]:
    """The engine's own way from a body to keys, without its model."""
    tokenizer = Tokenizer.load(checkpoint_dir())
    template = ChatTemplate.load(checkpoint_dir(), tokenizer.added_tokens, tokenizer.named_tokens)
    media = MediaPipeline.from_settings(MediaSettings(workers=1), checkpoint_dir())
    info = SimpleNamespace(model_name="demo", max_context_tokens=1 << 20)
    prompts = PromptEncoder(tokenizer, template, 64, NAMESPACE, info.max_context_tokens)
    engine: Any = SimpleNamespace(media=media, prompts=prompts, info=info)
    yield Preparer(engine, ServerSettings())
    media.close()


CORPUS = {
    "a file": (file(), "what moves?"),
    "a list": (frames(), "what moves?"),
    "between pictures": (picture(), "first", file(), picture(), "which?"),
    "twice, sampled in two ways": (file(fps=1), file(fps=2), "same?"),
    "a list at another rate": (frames(0.5), "when?"),
    "a whole number is a rate": (frames(2.0), frames(2)),
    "all options": (
        file(fps=1.5, min_frames=2, max_frames=6, min_pixels=5000, max_pixels=90_000, sampling="scenes"),
        "what?",
    ),
    "options beside the type": ({**file(), "fps": 1, "max_frames": 5}, "what?"),
    "bare spelling": ({"video": url(FILE)}, "what?"),
    "frames in an object": (
        {"type": "input_video", "video": {"frames": [{"url": url(f, "image/png")} for f in FRAMES], "fps": 2}},
        "what?",
    ),
}


@pytest.mark.parametrize("name", CORPUS)
def test_router_and_engine_derive_the_same_chain_for_clips(preparer: Preparer, name: str) -> None:
    data = body(*CORPUS[name])
    text, early = take_media_out(bytearray(data), preparer.engine.media.limits)
    fields = parse_body(text, ChatRequest).fields
    request = preparer.chat(fields, fields.messages, early, 1.0, 0.0).finish({})
    engines = tuple(boundary.media_key for boundary in request.prompt.boundaries)
    assert engines
    assert keys(*CORPUS[name]).chains[SCHEME] == engines


def test_every_option_of_a_clip_is_in_the_chain_and_none_in_its_content() -> None:
    ways: list[dict[str, Any]] = [
        {},
        {"fps": 1},
        {"min_frames": 6},
        {"max_frames": 6},
        {"min_pixels": 6},
        {"max_pixels": 6_000},
        {"sampling": "even"},
        {"sampling": "scenes"},
    ]
    read = [keys(file(**way)) for way in ways]
    assert len({request.chains[SCHEME] for request in read}) == len(ways)
    assert {request.media[0].name for request in read} == {content_id("video", FILE)}
    assert keys(frames(2)).media[0].name == frames_id(FRAMES) == keys(frames(3)).media[0].name
    assert keys(frames(2)).chains != keys(frames(3)).chains


def test_a_list_is_sized_by_its_frames_and_a_file_by_its_bytes() -> None:
    (listed,) = keys(frames()).media
    assert listed.num_tokens == 3 * 10 * 8  # three pairs of 320 x 256
    assert listed.num_patches == 4 * listed.num_tokens
    small, large = (keys(file(bytes(n))).media[0].num_tokens for n in (10, 1 << 20))
    assert (small, large) == (256, 4096)
    assert keys(file(bytes(1 << 25))).media[0].num_tokens == 12_288


def test_a_clip_by_link_has_the_name_of_its_link_until_its_content_is_known() -> None:
    linked = {"type": "video_url", "video_url": {"url": LINK}}
    (unknown,) = keys(linked).media
    assert (unknown.name, unknown.num_tokens) == (link_digest(LINK), USUAL.num_tokens)
    content = content_id("video", FILE)
    known = read_request(PATH, body(linked, "what?"), (SCHEME,), MediaSizer(), {link_digest(LINK): content}.get)
    assert known.media[0].name == content
    assert known.chains == keys(file(), "what?").chains
    mixed = {"type": "video", "video": [LINK, url(FRAMES[0], "image/png")], "fps": 1}
    assert keys(mixed).media[0].num_tokens == USUAL.num_tokens


def test_a_broken_clip_has_a_size_or_no_keys_and_raises_nothing() -> None:
    assert keys({"type": "video", "video": [url(b"no picture", "image/png")], "fps": 2}).media[0].num_tokens == 1024
    assert keys(frames(min_frames=10_000)).media[0].num_tokens == USUAL.num_tokens
    assert not keys({"type": "video", "video": [url(FRAMES[0])]}).media  # no rate: every pod refuses it
    assert not keys({"type": "video_url", "video_url": "file:///etc/passwd"}).media


def test_a_router_needs_no_decoder_of_clips() -> None:
    script = (
        "import sys; sys.modules['av'] = None\n"
        "from prism_server.router.request_keys import read_request\n"
        "from prism_server.router.media_size import MediaSizer\n"
        f"print(len(read_request({PATH!r}, {body(file())!r}, (), MediaSizer()).media), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["1", "False"], done.stderr


def test_the_pixels_of_a_list_and_of_a_file_are_not_the_same_content() -> None:
    one = [png(np.zeros((32, 32, 3), dtype=np.uint8))]
    assert len({frames_id(one), content_id("video", one[0]), content_id("image", one[0]), frames_id(one * 2)}) == 4
