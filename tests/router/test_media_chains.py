"""Invariant 31: router and engine derive the same media chain from the same request, the router without a tokenizer."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from prism_server.demo_model import checkpoint_dir
from prism_server.engine.messages import GenerateRequest
from prism_server.errors import BadRequest
from prism_server.identity import KEY_VERSION, namespace_digest
from prism_server.media.pipeline import MediaPipeline
from prism_server.prompt.encoder import PromptEncoder
from prism_server.prompt.template import ChatTemplate
from prism_server.prompt.tokenizer import Tokenizer
from prism_server.router.media_size import MediaSizer
from prism_server.router.pods import KeyScheme
from prism_server.router.request_keys import RequestKeys, read_request
from prism_server.serving.early_media import take_media_out
from prism_server.serving.prepare import Preparer
from prism_server.serving.schema import ChatRequest, GenerateBody, parse_body
from prism_server.settings import MediaSettings, ServerSettings

NAMESPACE = namespace_digest("model", "", "fp8", "processor")
SCHEME = KeyScheme(KEY_VERSION, NAMESPACE, "layout")
PATHS = {"/v1/chat/completions": ChatRequest, "/v1/generate": GenerateBody}
SIZER = MediaSizer()


def picture(colour: str, size: tuple[int, int] = (64, 48), form: str = "PNG") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, form)
    return out.getvalue()


PICTURES = [picture("red"), picture("blue"), picture("green", (96, 64), "JPEG"), picture("white", (200, 300))]


def base64_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


SPELLINGS = {
    "plain": base64_url,
    "upper case": lambda data: "DATA:IMAGE/PNG;BASE64," + base64.b64encode(data).decode(),
    "no media type": lambda data: "data:;base64," + base64.b64encode(data).decode(),
    "parameters": lambda data: "data:image/png;name=a.png;base64," + base64.b64encode(data).decode(),
    "url-safe": lambda data: "data:image/png;base64," + base64.urlsafe_b64encode(data).decode(),
    "no padding": lambda data: base64_url(data).rstrip("="),
    "lines": lambda data: "data:image/png;base64,\n" + base64.encodebytes(data).decode(),
    "percent": lambda data: "data:image/png," + quote(data),
    "percent in base64": lambda data: "data:image/png;base64," + quote(base64.b64encode(data).decode(), safe=""),
    "leading blank": lambda data: "  " + base64_url(data),
}


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


def engines_chain(preparer: Preparer, path: str, body: bytes) -> tuple[bytes, ...]:
    """Media-chain keys of the boundaries of the prompt that the engine would run."""
    text, early = take_media_out(bytearray(body), preparer.engine.media.limits)
    fields = parse_body(text, PATHS[path]).fields
    request: GenerateRequest = preparer.chat(fields, fields.messages or [], early, 1.0, 0.0).finish({})
    return tuple(boundary.media_key for boundary in request.prompt.boundaries if boundary.media_key)


def routers_keys(path: str, body: bytes) -> RequestKeys:
    return read_request(path, body, (SCHEME,), SIZER)


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def image(data: bytes, spelling: str = "plain", **options: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": SPELLINGS[spelling](data), **options}}


CORPUS: dict[str, dict[str, Any]] = {
    "picture then text": {"messages": user(image(PICTURES[0]), {"type": "text", "text": "what?"})},
    "text then picture": {"messages": user({"type": "text", "text": "look:"}, image(PICTURES[0]))},
    "text parts are not merged": {"messages": user("a", "b", image(PICTURES[0]))},
    "text parts, one": {"messages": user("ab", image(PICTURES[0]))},
    "several": {"messages": user(*(image(data) for data in PICTURES), "compare")},
    "twice the same": {"messages": user(image(PICTURES[1]), "and again", image(PICTURES[1]))},
    "roles": {
        "messages": [
            {"role": "developer", "content": "be brief"},
            {"role": "user", "content": [image(PICTURES[0]), "what?"]},
            {"role": "assistant", "content": "a red square", "reasoning_content": "hm"},
            {"role": "user", "content": [{"type": "input_text", "text": "and"}, image(PICTURES[2])]},
        ]
    },
    "system": {"messages": [{"role": "system", "content": "be brief"}, *user(image(PICTURES[0]))]},
    "empty texts": {"messages": user("", image(PICTURES[0]), "")},
    "salt": {"messages": user(image(PICTURES[0])), "cache_salt": "tenant-a"},
    "empty salt": {"messages": user(image(PICTURES[0])), "cache_salt": ""},
    "null salt": {"messages": user(image(PICTURES[0])), "cache_salt": None},
    "options": {"messages": user(image(PICTURES[3], max_pixels=20_000), image(PICTURES[3], min_pixels=5_000))},
    "options beside": {
        "messages": user({"type": "image_url", "image_url": base64_url(PICTURES[3]), "max_pixels": 30_000})
    },
    "no type": {"messages": user({"image": base64_url(PICTURES[0])}, {"text": "what?"})},
    "input_image": {"messages": user({"type": "input_image", "image_url": base64_url(PICTURES[0])})},
    "unicode": {"messages": user("Größe? 你好 😀 \u0000\u2028", image(PICTURES[0]))},
    "control text": {"messages": user("<|im_start|>system", image(PICTURES[0]))},
    "further fields": {"messages": user(image(PICTURES[0])), "temperature": 0.2, "stream": True, "nonsense": [1]},
} | {f"spelled {name}": {"messages": user("see", image(PICTURES[1], name), "now")} for name in SPELLINGS}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", CORPUS)
def test_router_and_engine_derive_the_same_media_chain_from_the_same_request(
    preparer: Preparer, path: str, name: str
) -> None:
    body = json.dumps(CORPUS[name]).encode()
    expected = engines_chain(preparer, path, body)
    assert expected
    keys = routers_keys(path, body)
    assert keys.chains[SCHEME] == expected
    assert len(keys.media) == len(expected)


@pytest.mark.parametrize("escape", [lambda text: text.replace("/", "\\/"), lambda text: text.replace("+", "\\u002b")])
def test_json_escapes_do_not_change_the_chain(preparer: Preparer, escape: Any) -> None:
    plain = json.dumps(CORPUS["several"])
    body = escape(plain).encode()
    assert body != plain.encode()
    assert routers_keys("/v1/generate", body).chains[SCHEME] == engines_chain(preparer, "/v1/generate", plain.encode())


parts = st.lists(
    st.one_of(
        st.text(max_size=20).map(lambda text: {"type": "text", "text": text}),
        st.builds(image, st.sampled_from(PICTURES), st.sampled_from(sorted(SPELLINGS))),
        st.builds(lambda data, most: image(data, max_pixels=most), st.sampled_from(PICTURES), st.just(40_000)),
    ),
    min_size=1,
    max_size=5,
)
turns = st.lists(parts.map(lambda content: {"role": "user", "content": content}), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(messages=turns, salt=st.none() | st.text(max_size=5))
def test_any_conversation_gives_both_the_same_chain(
    preparer: Preparer, messages: list[dict[str, Any]], salt: str | None
) -> None:
    body = json.dumps({"messages": messages, "cache_salt": salt}).encode()
    try:
        expected = engines_chain(preparer, "/v1/chat/completions", body)
    except BadRequest:  # such as a conversation that is empty, or no Unicode
        return
    assert routers_keys("/v1/chat/completions", body).chains.get(SCHEME, ()) == expected


def test_requests_that_differ_in_salt_role_order_or_options_share_no_chain() -> None:
    names = ("picture then text", "text then picture", "system", "salt", "empty salt", "several", "options")
    last_keys = {routers_keys("/v1/generate", json.dumps(CORPUS[name]).encode()).chains[SCHEME][-1] for name in names}
    assert len(last_keys) == len(names)
