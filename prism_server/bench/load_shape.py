"""The shape of a load of repeated media: which questions about which pictures, in which order. All from a seed."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
from PIL import Image

from prism_server.bench.client import user_message
from prism_server.bench.stream_stats import Kind

COARSE_PIXELS = 28
"""Noise of so many pixels a side, enlarged: a picture that compresses like a photograph."""
JPEG_QUALITY = 90
QUESTION_WORDS = 22
PICTURES_KEPT = 512
"""Of those that were drawn; a run asks about the same ones again and again."""

WORDS = ("river", "table", "winter", "garden", "letter", "bridge", "market", "window", "silver", "morning", "paper")


@dataclass(frozen=True, slots=True)
class LoadShape:
    """Groups of pictures, and questions about each group."""

    num_groups: int = 8
    num_questions: int = 8
    """About each group, where every group has as many."""
    pictures_per_group: int = 8
    picture_size: tuple[int, int] = (448, 448)
    """Width and height in pixels."""
    output_tokens: int = 64
    zipf_exponent: float = 1.0
    """Of how often a group is asked about, by rank, where groups are drawn; 0: all alike."""
    seed: int = 0
    """Other seeds give other pictures: a server that has been measured knows those of this one."""
    extra_fields: Mapping[str, Any] = field(default_factory=lambda: {"ignore_eos": True})
    """Of every request's body."""


@dataclass(frozen=True, slots=True)
class Job:
    """One request that is ready to be sent."""

    kind: Kind
    body: bytes = field(repr=False)


class LoadMaker:
    """Makes request bodies. Equal arguments give equal bytes."""

    def __init__(self, shape: LoadShape, model: str) -> None:
        self.shape = shape
        self._model = model

    def about(self, group: str, question: int, kind: Kind, output_tokens: int | None = None) -> Job:
        """A question about the pictures of a group, whatever name it has."""
        shape = self.shape
        pictures = [
            draw_picture(f"{shape.seed} {group} {i}", shape.picture_size) for i in range(shape.pictures_per_group)
        ]
        text = f"Question {question}: {self._words(f'{group} {question}', QUESTION_WORDS)}. Answer briefly."
        return self._job(kind, pictures, text, output_tokens or shape.output_tokens)

    def text(self, name: str, num_words: int, output_tokens: int) -> Job:
        """A prompt without pictures, about a token a word."""
        return self._job("stream", (), self._words(name, num_words), output_tokens)

    def every_question(self, name: str) -> list[Job]:
        """Each question about each group once, shuffled; the first about a group is cold."""
        shape = self.shape
        pairs = [(group, question) for group in range(shape.num_groups) for question in range(shape.num_questions)]
        random.Random(f"{shape.seed} {name} order").shuffle(pairs)
        return list(self._in_order(name, pairs))

    def drawn_questions(self, name: str, count: int) -> list[Job]:
        """`count` questions about groups drawn by Zipf's law, no question twice; the first about a group is cold."""
        groups = zipf_ranks(self.shape, f"{self.shape.seed} {name} groups", count)
        return list(self._in_order(name, [(group, question) for question, group in enumerate(groups)]))

    def _in_order(self, name: str, pairs: Sequence[tuple[int, int]]) -> Iterator[Job]:
        seen = set[int]()
        for group, question in pairs:
            yield self.about(f"{name} {group}", question, "hot" if group in seen else "cold")
            seen.add(group)

    def _job(self, kind: Kind, pictures: Sequence[bytes], text: str, output_tokens: int) -> Job:
        body = {
            "model": self._model,
            "messages": [user_message(pictures, text)],
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return Job(kind, msgspec.json.encode(body | dict(self.shape.extra_fields)))

    def _words(self, name: str, count: int) -> str:
        return " ".join(random.Random(f"{self.shape.seed} {name}").choices(WORDS, k=count))


def zipf_ranks(shape: LoadShape, seed: str, count: int) -> list[int]:
    """`count` groups, rank k drawn as often as 1 / (k + 1)^exponent says."""
    weights = [(rank + 1) ** -shape.zipf_exponent for rank in range(shape.num_groups)]
    return random.Random(seed).choices(range(shape.num_groups), weights, k=count)


def poisson_arrivals_s(rate: float, seed: str, count: int) -> list[float]:
    """When each of `count` requests is sent, `rate` a second on average, as if by many independent people."""
    source, now_s, arrivals = random.Random(seed), 0.0, list[float]()
    for _ in range(count):
        now_s += source.expovariate(rate)
        arrivals.append(now_s)
    return arrivals


@lru_cache(PICTURES_KEPT)
def draw_picture(key: str, size: tuple[int, int]) -> bytes:
    """A JPEG file of coloured noise, another one for every key."""
    values = np.frombuffer(random.Random(key).randbytes(3 * COARSE_PIXELS**2), np.uint8)
    coarse = Image.fromarray(values.reshape(COARSE_PIXELS, COARSE_PIXELS, 3))
    file = io.BytesIO()
    coarse.resize(size, Image.Resampling.BICUBIC).save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()
