"""The checkpoint's tokenizer: text to ids that are never control tokens, and ids to bytes."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers

from prism_server.capacity.units import MIB
from prism_server.checkpoint_files import read_object, read_object_or_empty
from prism_server.errors import StartupError
from prism_server.prompt.memo import TextMemo

DEFAULT_MEMO_BYTES = 32 * MIB
SHORT_CHARACTERS = 1024
"""Encoded in a fifth of a millisecond."""
NORMALISED_CHARACTERS = 256
"""At a time: Python's NFC takes a time quadratic in the length of a run of marks, and nothing else runs meanwhile."""
SEAM_BYTES = 16
"""More than NFC can save where two pieces meet: a character takes in three marks at most, each of up to four bytes."""


@dataclass(frozen=True, slots=True)
class MediaTokens:
    """Ids that stand for media. They come from `config.json`, checked against the tokenizer."""

    image_pad: int
    video_pad: int
    vision_start: int
    vision_end: int

    @property
    def kind_of_pad(self) -> dict[int, str]:
        """Placeholder id -> kind of medium."""
        return {self.image_pad: "image", self.video_pad: "video"}


class Tokenizer:
    """Two sides. Encoding knows no added token, so text that spells `<|im_start|>` or `<think>` stays text: control
    tokens get into a prompt as ids only, through the template. Decoding knows them all.

    Safe from any thread.
    """

    def __init__(
        self,
        encoder: tokenizers.Tokenizer,
        added_tokens: Mapping[str, int],
        special_ids: Iterable[int],
        media_tokens: MediaTokens,
        eos_ids: Sequence[int],
        vocab_size: int,
        named_tokens: Mapping[str, str],
        memo_bytes: int = DEFAULT_MEMO_BYTES,
    ) -> None:
        self.added_tokens = dict(added_tokens)
        """Every token outside the BPE vocabulary, special or not: its text and its id."""
        self.special_ids = frozenset(special_ids)
        """Added tokens that are not part of an answer's text."""
        self.media_tokens = media_tokens
        self.eos_ids = tuple(eos_ids)
        self.vocab_size = vocab_size
        """Rows of the embedding: ids lie in [0, vocab_size). At least the number of tokens."""
        self.named_tokens = dict(named_tokens)
        """`eos_token`, `pad_token`, ...: what a chat template may refer to."""
        self.memo = TextMemo(memo_bytes)
        self._encoder = encoder
        self._bytes = _token_bytes(encoder.get_vocab(with_added_tokens=False), self.added_tokens, vocab_size)
        self._texts: dict[int, str | None] = {}
        added = set(self.added_tokens.values())
        self.longest_token_bytes = max(len(raw) for i, raw in enumerate(self._bytes) if i not in added)

    @classmethod
    def load(cls, directory: Path, memo_bytes: int = DEFAULT_MEMO_BYTES) -> Tokenizer:
        """Reads `tokenizer.json`, `tokenizer_config.json`, `config.json` and, if there, `generation_config.json`.

        StartupError, in one line, for a file that is missing, broken or at odds with another one.
        """
        path = directory / "tokenizer.json"
        spec = read_object(path)
        tokenizer_config = read_object_or_empty(directory / "tokenizer_config.json")
        config = read_object(directory / "config.json")
        generation_config = read_object_or_empty(directory / "generation_config.json")
        added = _added_tokens(spec, tokenizer_config)
        ids = {token["content"]: token["id"] for token in added}
        encoder = _text_encoder(spec, path, ids)
        named = _named_tokens(tokenizer_config)
        return cls(
            encoder=encoder,
            added_tokens=ids,
            special_ids=[token["id"] for token in added if token.get("special")],
            media_tokens=_media_tokens(config, ids, directory / "config.json"),
            eos_ids=_eos_ids(generation_config, named, ids, directory),
            vocab_size=_vocab_size(config, encoder, ids, directory / "config.json"),
            named_tokens=named,
            memo_bytes=memo_bytes,
        )

    def encode_runs(self, runs: Sequence[str]) -> list[npt.NDArray[np.int32]]:
        """Ids of each run of text, int32 and read-only. Runs seen before are looked up, the others encoded together.

        A run must be valid Unicode (no lone surrogates).
        """
        found: dict[str, npt.NDArray[np.int32]] = {}
        missing: list[str] = []
        for run in dict.fromkeys(runs):
            ids = self.memo.get(run)
            if ids is None:
                missing.append(run)
            else:
                found[run] = ids
        for run, encoding in zip(missing, self._encode(missing), strict=True):
            found[run] = np.asarray(encoding.ids, dtype=np.int32)
            self.memo.put(run, found[run])
        return [found[run] for run in runs]

    def _encode(self, runs: Sequence[str]) -> list[tokenizers.Encoding]:
        """The batch call lets other threads run and wakes some of its own: too much for a question of a line."""
        if sum(map(len, runs)) <= SHORT_CHARACTERS:
            return [self._encoder.encode(run, add_special_tokens=False) for run in runs]
        return self._encoder.encode_batch_fast(list(runs), add_special_tokens=False)

    def least_tokens(self, text: str, enough: int) -> int:
        """A lower bound of the tokens of `text`, without encoding it. What is beyond `enough` is not counted.

        NFC, which comes first, may shorten the text.
        """
        if text.isascii():
            return min(enough, -(-len(text) // self.longest_token_bytes))
        num_bytes = 0
        for at in range(0, len(text), NORMALISED_CHARACTERS):
            composed = unicodedata.normalize("NFC", text[at : at + NORMALISED_CHARACTERS])
            num_bytes += max(0, len(composed.encode()) - SEAM_BYTES)
            if num_bytes >= enough * self.longest_token_bytes:
                return enough
        return -(-num_bytes // self.longest_token_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes, perhaps part of a character only. Empty for ids that pad the embedding."""
        return self._bytes[token_id]

    def token_text(self, token_id: int) -> str | None:
        """The token as text where it is whole characters, as nearly all are; None where it is not. Looked up."""
        try:
            return self._texts[token_id]
        except KeyError:
            try:
                text: str | None = self._bytes[token_id].decode()
            except UnicodeDecodeError:
                text = None
            self._texts[token_id] = text
            return text

    def decode(self, token_ids: Iterable[int], skip_special: bool = True) -> str:
        """Text of the ids at once; bytes that are not UTF-8 become U+FFFD."""
        skipped = self.special_ids if skip_special else frozenset[int]()
        return b"".join(self._bytes[i] for i in token_ids if i not in skipped).decode("utf-8", "replace")


def _added_tokens(spec: Mapping[str, Any], tokenizer_config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Entries of `added_tokens`, and those that only the older `added_tokens_decoder` names."""
    tokens = [dict(token) for token in spec.get("added_tokens") or []]
    known = {token["content"] for token in tokens}
    for token_id, token in (tokenizer_config.get("added_tokens_decoder") or {}).items():
        if token["content"] not in known:
            tokens.append({**token, "id": int(token_id)})
    for token in tokens:
        if token.get("lstrip") or token.get("rstrip") or token.get("single_word"):
            raise StartupError(f"added token {token['content']} strips its neighbours, which Qwen3-VL's never do")
    return tokens


def _text_encoder(spec: Mapping[str, Any], path: Path, added_tokens: Mapping[str, int]) -> tokenizers.Tokenizer:
    """The tokenizer without its added tokens. StartupError unless it is byte-level BPE that cannot spell them."""
    if "ByteLevel" not in json.dumps(spec.get("decoder")):
        raise StartupError(f"{path} is not a byte-level tokenizer, the only kind that Qwen3-VL uses")
    plain = {**spec, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None}
    try:
        encoder = tokenizers.Tokenizer.from_str(json.dumps(plain))
    except Exception as error:  # the library raises nothing more precise
        raise StartupError(f"{path} is not a tokenizer: {error}") from error
    if not encoder.get_vocab_size(with_added_tokens=False):
        raise StartupError(f"{path} has an empty vocabulary")
    for text, token_id in added_tokens.items():
        if token_id in encoder.encode(text, add_special_tokens=False).ids:
            raise StartupError(f"{path}: plain text that spells {text} would become the control token {token_id}")
    return encoder


def _media_tokens(config: Mapping[str, Any], added_tokens: Mapping[str, int], path: Path) -> MediaTokens:
    added = set(added_tokens.values())
    found: dict[str, int] = {}
    for name, key in (
        ("image_pad", "image_token_id"),
        ("video_pad", "video_token_id"),
        ("vision_start", "vision_start_token_id"),
        ("vision_end", "vision_end_token_id"),
    ):
        token_id = config.get(key)
        if not isinstance(token_id, int) or token_id not in added:
            raise StartupError(f"{path}: {key} {token_id} is not an added token of tokenizer.json")
        found[name] = token_id
    if len(set(found.values())) < len(found):
        raise StartupError(f"{path}: the media tokens must differ: {found}")
    return MediaTokens(**found)


def _named_tokens(tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """`eos_token` and its like; each is a string or, in older files, an object with `content`."""
    named: dict[str, str] = {}
    for name in ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token"):
        value = tokenizer_config.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            named[name] = text
    return named


def _eos_ids(
    generation_config: Mapping[str, Any], named: Mapping[str, str], added_tokens: Mapping[str, int], directory: Path
) -> list[int]:
    """Ids that end an answer: `generation_config.json` says them, as the reference reads it; else the `eos_token`."""
    stated = generation_config.get("eos_token_id")
    if stated is None:
        stated = added_tokens.get(named.get("eos_token", ""))
    ids = stated if isinstance(stated, list) else [stated]
    if not ids or not all(isinstance(token_id, int) for token_id in ids):
        raise StartupError(
            f"{directory}: neither generation_config.json nor tokenizer_config.json says what ends a text"
        )
    return list(ids)


def _vocab_size(
    config: Mapping[str, Any], encoder: tokenizers.Tokenizer, added_tokens: Mapping[str, int], path: Path
) -> int:
    """Rows of the embedding, which must hold every token."""
    size = (config.get("text_config") or config).get("vocab_size")
    largest = max([*encoder.get_vocab(with_added_tokens=False).values(), *added_tokens.values()])
    if not isinstance(size, int) or size <= largest:
        raise StartupError(f"{path}: vocab_size {size} has no room for token {largest} of tokenizer.json")
    return size


def _byte_of_character() -> dict[str, int]:
    """The printable alphabet in which byte-level BPE files spell bytes (GPT-2, Radford et al. 2019): printable Latin-1
    bytes stand for themselves, the other 68, in order, are the characters from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def _token_bytes(vocab: Mapping[str, int], added_tokens: Mapping[str, int], vocab_size: int) -> list[bytes]:
    """Bytes of every id. A token with a character outside the alphabet is plain text, as the reference decodes it."""
    alphabet = _byte_of_character()
    table = [b""] * vocab_size
    for text, token_id in (*vocab.items(), *added_tokens.items()):
        spelled = all(character in alphabet for character in text)
        table[token_id] = bytes(alphabet[character] for character in text) if spelled else text.encode()
    return table
