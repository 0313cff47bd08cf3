"""The examples of the page's gallery: how they were made. `make examples` writes them again, equal to the pixel.

Everything comes from the demo model's own generator, so that the bundled model can answer the suggested questions.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from PIL import Image

from prism_server.bench.demo_script import script
from prism_server.bench.report import write_json
from prism_server.cli_support import ArgumentParser, console_script
from prism_server.demo_model import LAYOUT_BY_NAME, Turn, draw_sample, encode_png
from prism_server.demo_model.clips import FRAMES_PER_SECOND, Clip, draw_clip
from prism_server.demo_model.layouts import Slot
from prism_server.demo_model.pages import draw_page
from prism_server.page.site import FILES

DIRECTORY = FILES / "examples"


@dataclass(frozen=True, slots=True)
class File:
    """A picture (one frame) or a clip of the gallery."""

    name: str
    frames: tuple[Image.Image, ...] = field(repr=False)

    @property
    def is_clip(self) -> bool:
        return len(self.frames) > 1

    def encoded(self) -> bytes:
        """A PNG, or a GIF: the shapes have few colours, so that its palette loses nothing."""
        return encode_gif(self.frames) if self.is_clip else encode_png(self.frames[0])


@dataclass(frozen=True, slots=True)
class Example:
    """What a click puts before the model, and questions that it can answer about it."""

    id: str
    title: str
    files: tuple[File, ...]
    turns: tuple[Turn, ...]

    def entry(self) -> dict[str, object]:
        """As the page reads it."""
        files = [
            {
                "name": file.name,
                "type": "image/gif" if file.is_clip else "image/png",
                "kind": "video" if file.is_clip else "image",
                "width": file.frames[0].width,
                "height": file.frames[0].height,
            }
            for file in self.files
        ]
        questions = [turn.question for turn in self.turns]
        return {"id": self.id, "title": self.title, "files": files, "questions": questions}


def encode_gif(frames: Sequence[Image.Image]) -> bytes:
    """The frames as an endless GIF with the generator's frame rate."""
    first, *others = frames
    out = io.BytesIO()
    duration_ms = round(1000 / FRAMES_PER_SECOND)
    first.save(out, "GIF", save_all=True, append_images=others, duration=duration_ms, loop=0)
    return out.getvalue()


def examples() -> list[Example]:
    """The gallery, in its order."""
    return [_invoices(), _invoice(), _scene(), _pictures(), _clip()]


def _invoices() -> Example:
    """The pages of `make demo`, and its questions about them."""
    first, *others = (step for step in script() if step.title != "page 5 is another")
    same = [step.turn for step in (first, *others) if step.pages == first.pages]
    files = tuple(File(f"invoices-{number}.png", (page.image,)) for number, page in enumerate(first.pages, 1))
    return Example("invoices", "Eight invoices", files, tuple(dict.fromkeys(same)))


def _invoice() -> Example:
    page = draw_page(random.Random(4), Slot(288, 352))
    invoice = page.invoice
    item = invoice.items[0]
    turns = (
        Turn("total", "What is the total?", invoice.total),
        Turn("customer", "Who is the customer?", invoice.customer),
        Turn("price", f"How much do the {item.goods} cost?", item.price),
        Turn("read", "Read the page.", "\n".join(invoice.lines)),
    )
    return Example("invoice", "One invoice", (File("invoice.png", (page.image,)),), turns)


def _scene() -> Example:
    sample = draw_sample(random.Random(0), LAYOUT_BY_NAME["scene-256x192"])
    return Example("scene", "A scene", (File("scene.png", (sample.pictures[0],)),), sample.turns[:4])


def _pictures() -> Example:
    sample = draw_sample(random.Random(3), LAYOUT_BY_NAME["scenes-3"])
    files = tuple(File(f"pictures-{number}.png", (picture,)) for number, picture in enumerate(sample.pictures, 1))
    return Example("pictures", "Three pictures", files, sample.turns[:4])


def _clip() -> Example:
    clip: Clip = draw_clip(random.Random(9), LAYOUT_BY_NAME["clip-12"].slots)
    assert clip.late is not None
    turns = (
        Turn("clip", "What happens in the video?", clip.description()),
        Turn("when", f"When does the {clip.late.shape} appear?", clip.appearance(clip.late)),
        Turn("way", f"Which way does the {clip.shape} move?", clip.way),
    )
    return Example("clip", "A clip", (File("clip.gif", clip.frames),), turns)


def write(directory: Path) -> list[Path]:
    """The files of all examples, and `examples.json` that names them; their paths."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for example in examples():
        for file in example.files:
            paths.append(directory / file.name)
            paths[-1].write_bytes(file.encoded())
    manifest = directory / "examples.json"
    write_json(manifest, {"examples": [example.entry() for example in examples()]})
    return [*paths, manifest]


@console_script("page-examples")
def main(argv: Sequence[str]) -> int:
    parser = ArgumentParser("python -m prism_server.bench.page_examples", "Write the examples of the page's gallery.")
    parser.parse_strictly(argv)
    for path in write(DIRECTORY):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(None))
