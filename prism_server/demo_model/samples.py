"""A sample of a layout: media as the model sees them, and turns of questions whose answers can be read off them."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from PIL import Image

from prism_server.demo_model.clips import Clip, draw_clip
from prism_server.demo_model.drawing import encode_jpeg
from prism_server.demo_model.layouts import Layout
from prism_server.demo_model.pages import Page, draw_page
from prism_server.demo_model.scenes import Scene, draw_scene
from prism_server.demo_model.texts import text_turn
from prism_server.demo_model.turns import Turn, distinct

Media = tuple[()] | tuple[Scene, ...] | tuple[Page, ...] | tuple[Clip]
Picture = TypeVar("Picture", Scene, Page)

SCENE_TURNS, PAGE_TURNS, CLIP_TURNS, TEXT_TURNS = 8, 14, 6, 4
"""Questions drawn for a sample; a question that comes twice is kept once."""
JPEG_SHARE = 0.12
"""Of the samples with pictures: shown as they look after JPEG, as a camera or a browser would have sent them."""


@dataclass(frozen=True, slots=True)
class Sample:
    """`media` is what was drawn (pictures, pages or one clip), `pictures` what is shown of it (a clip's frames)."""

    layout: Layout
    media: Media
    pictures: list[Image.Image] = field(repr=False)
    turns: tuple[Turn, ...]


def draw_sample(rng: random.Random, layout: Layout) -> Sample:
    """The next sample that `rng` gives for `layout`; equal seeds give equal samples."""
    match layout.kind:
        case "text":
            return Sample(layout, (), [], _turns(rng, (), TEXT_TURNS))
        case "clip":
            clip = draw_clip(rng, layout.slots)
            return Sample(layout, (clip,), list(clip.frames), _turns(rng, (clip,), CLIP_TURNS))
        case "scene":
            scenes = tuple(draw_scene(rng, slot) for slot in layout.slots)
            turns = _turns(rng, scenes, SCENE_TURNS)
            return Sample(layout, scenes, _shown(rng, [scene.image for scene in scenes]), turns)
        case "pages":
            pages = tuple(draw_page(rng, slot) for slot in layout.slots)
            turns = _turns(rng, pages, PAGE_TURNS)
            return Sample(layout, pages, _shown(rng, [page.image for page in pages]), turns)


def ask(rng: random.Random, media: Media) -> Turn:
    """One question about what is shown: about one medium, or, of several, also which of them shows what.

    Without media one that needs none.
    """
    if not media:
        return text_turn(rng)
    if clips := [medium for medium in media if isinstance(medium, Clip)]:
        return clips[0].turn(rng)
    if scenes := [medium for medium in media if isinstance(medium, Scene)]:
        return _ask_about(rng, scenes, " in picture", _ask_across_scenes)
    return _ask_about(rng, [medium for medium in media if isinstance(medium, Page)], " on page", _ask_across_pages)


def jpeg_copy(rng: random.Random, image: Image.Image) -> Image.Image:
    """The picture as it looks after JPEG, as a camera or a browser would have sent it."""
    return Image.open(io.BytesIO(encode_jpeg(image, rng.randint(60, 95)))).convert("RGB")


def _turns(rng: random.Random, media: Media, count: int) -> tuple[Turn, ...]:
    return distinct(ask(rng, media) for _ in range(count))


def _ask_about(
    rng: random.Random,
    media: Sequence[Picture],
    place: str,
    ask_across: Callable[[random.Random, Sequence[Picture], int], Turn],
) -> Turn:
    index = rng.randrange(len(media))
    if len(media) == 1:
        return media[index].turn(rng)
    if rng.random() < 0.6:
        return media[index].turn(rng, f"{place} {index + 1}")
    return ask_across(rng, media, index)


def _ask_across_scenes(rng: random.Random, scenes: Sequence[Scene], index: int) -> Turn:
    name = rng.choice(scenes[index].shapes).name
    if sum(any(shape.name == name for shape in scene.shapes) for scene in scenes) == 1:
        return Turn("which", f"In which picture is the {name}?", f"picture {index + 1}")
    return Turn("media", "How many pictures are there?", str(len(scenes)))


def _ask_across_pages(rng: random.Random, pages: Sequence[Page], index: int) -> Turn:
    """A question that names its page by number or customer; only where no other page has the same."""
    invoice, invoices = pages[index].invoice, [page.invoice for page in pages]
    draw = rng.random()
    if draw >= 0.9 or sum(other.number == invoice.number for other in invoices) > 1:
        return Turn("media", "How many pages are there?", str(len(pages)))
    if draw < 0.45:
        question, answer = rng.choice(
            [
                (f"What is the total of invoice {invoice.number}?", invoice.total),
                (f"What is the date of invoice {invoice.number}?", invoice.date),
                (f"Who is the customer of invoice {invoice.number}?", invoice.customer),
            ]
        )
        return Turn("of", question, answer)
    wordings = [f"On which page is invoice {invoice.number}?"]
    if sum(other.customer == invoice.customer for other in invoices) == 1:
        wordings.append(f"Which page is for {invoice.customer}?")
    return Turn("find", rng.choice(wordings), f"page {index + 1}")


def _shown(rng: random.Random, images: list[Image.Image]) -> list[Image.Image]:
    if rng.random() >= JPEG_SHARE:
        return images
    return [jpeg_copy(rng, image) for image in images]
