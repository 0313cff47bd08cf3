"""Checkpoint directories to read prompts with: the bundled demo model's, and one in the manner of the released ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

import prism_server
from prism_server.identity import content_id, namespace_digest
from prism_server.media.item import ItemFacts, ItemKey, MediaItem
from prism_server.prompt.encoder import PromptEncoder
from prism_server.prompt.template import ChatTemplate
from prism_server.prompt.tokenizer import Tokenizer

DEMO = Path(prism_server.__file__).parent / "demo_model" / "checkpoint"

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "user\nassistant\nsystem\nThe quick brown fox jumps over the lazy dog, and then it rests.\n\n",
    'Totals: 12.50 EUR, 3 items; see <table> and </table>, a < b > c.\n{"name": "get_weather", "arguments": {}}',
    "Der schnelle Fuchs springt über den Hund. 你好世界。 Съешь же ещё этих булок. مرحبا 😀\t\t  \n\n\n",
] * 8
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>")
SPECIAL += ("<|image_pad|>", "<|video_pad|>")
ORDINARY = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# What the released template does, in words of our own: tools in the system turn, media counted when asked for, tool
# results in a user turn, `image` recognised by type or by key.
TEMPLATE = r"""
{%- set seen = namespace(pictures=0, clips=0) -%}
{%- macro show(content) -%}
    {%- if content is string -%}
        {{- content -}}
    {%- else -%}
        {%- for part in content -%}
            {%- if part.type == 'image' or 'image' in part or 'image_url' in part -%}
                {%- set seen.pictures = seen.pictures + 1 -%}
                {%- if add_vision_id %}Picture {{ seen.pictures }}: {% endif -%}
                <|vision_start|><|image_pad|><|vision_end|>
            {%- elif part.type == 'video' or 'video' in part -%}
                {%- set seen.clips = seen.clips + 1 -%}
                {%- if add_vision_id %}Video {{ seen.clips }}: {% endif -%}
                <|vision_start|><|video_pad|><|vision_end|>
            {%- elif 'text' in part -%}
                {{- part.text -}}
            {%- endif -%}
        {%- endfor -%}
    {%- endif -%}
{%- endmacro -%}
{%- if tools -%}
    {{- '<|im_start|>system\n' -}}
    {%- if messages[0].role == 'system' -%}{{- show(messages[0].content) + '\n\n' -}}{%- endif -%}
    {{- 'You may call functions:\n<tools>' -}}
    {%- for tool in tools -%}{{- '\n' -}}{{- tool | tojson -}}{%- endfor -%}
    {{- '\n</tools><|im_end|>\n' -}}
{%- elif messages[0].role == 'system' -%}
    {{- '<|im_start|>system\n' + show(messages[0].content) + '<|im_end|>\n' -}}
{%- endif -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}
        {{- '<|im_start|>user\n' + show(message.content) + '<|im_end|>\n' -}}
    {%- elif message.role == 'assistant' -%}
        {{- '<|im_start|>assistant\n' + show(message.content) -}}
        {%- for call in message.tool_calls or [] -%}
            {%- set function = call.function -%}
            {{- '\n<tool_call>\n{"name": "' + function.name + '", "arguments": ' -}}
            {%- if function.arguments is string -%}{{- function.arguments -}}
            {%- else -%}{{- function.arguments | tojson -}}{%- endif -%}
            {{- '}\n</tool_call>' -}}
        {%- endfor -%}
        {{- '<|im_end|>\n' -}}
    {%- elif message.role == 'tool' -%}
        {{- '<|im_start|>user\n<tool_response>\n' + show(message.content) + '\n</tool_response><|im_end|>\n' -}}
    {%- elif message.role == 'system' and not loop.first -%}
        {{- raise_exception('a system message must come first') -}}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}
"""


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")


@pytest.fixture(scope="session")
def released_style_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files as released models have them: specials after the BPE ids, a padded embedding, a template with tools."""
    directory = tmp_path_factory.mktemp("released")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(SPLIT), behavior="isolated"), byte_level]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, normalized=False, special=False) for text in ORDINARY])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"}
    write_json(directory / "tokenizer_config.json", names)
    ids = {
        "image_token_id": tokenizer.token_to_id("<|image_pad|>"),
        "video_token_id": tokenizer.token_to_id("<|video_pad|>"),
        "vision_start_token_id": tokenizer.token_to_id("<|vision_start|>"),
        "vision_end_token_id": tokenizer.token_to_id("<|vision_end|>"),
    }
    write_json(directory / "config.json", {"model_type": "qwen3_vl", "text_config": {"vocab_size": 512}, **ids})
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    return directory


@pytest.fixture(params=["demo", "released"])
def checkpoint(request: pytest.FixtureRequest) -> Path:
    """Each of the two."""
    if request.param == "demo":
        return DEMO
    directory: Path = request.getfixturevalue("released_style_dir")
    return directory


@pytest.fixture(scope="session")
def demo_tokenizer() -> Tokenizer:
    return Tokenizer.load(DEMO)


@pytest.fixture(scope="session")
def released_tokenizer(released_style_dir: Path) -> Tokenizer:
    return Tokenizer.load(released_style_dir)


MakeEncoder = Callable[..., PromptEncoder]


@pytest.fixture(scope="session")
def make_encoder() -> MakeEncoder:
    """encoder(directory, page_tokens=16, max_context_tokens=100000, model="m")."""

    def make(
        directory: Path = DEMO, page_tokens: int = 16, max_context_tokens: int = 100_000, model: str = "m"
    ) -> PromptEncoder:
        tokenizer = Tokenizer.load(directory)
        template = ChatTemplate.load(directory, tokenizer.added_tokens, tokenizer.named_tokens)
        namespace = namespace_digest(model, "", "fp32", "processor")
        return PromptEncoder(tokenizer, template, page_tokens, namespace, max_context_tokens)

    return make


MakePicture = Callable[..., tuple[ItemFacts, MediaItem]]


@pytest.fixture(scope="session")
def make_picture() -> MakePicture:
    """picture(height, width, data=b"picture", layout=...): sizes in pixels, multiples of 32."""

    def make(
        height: int = 64, width: int = 64, data: bytes = b"picture", layout: bytes = b"l" * 32
    ) -> tuple[ItemFacts, MediaItem]:
        key = ItemKey(content_id("image", data), layout)
        grid = (1, height // 16, width // 16)
        facts = ItemFacts(key, "image", grid, grid[1] * grid[2] // 4, width, height)
        return facts, MediaItem("image", data)

    return make
