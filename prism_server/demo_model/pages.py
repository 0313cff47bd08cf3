"""Invoice pages, and questions about them."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from prism_server.demo_model.drawing import RGB, advance, font, jittered, text_width
from prism_server.demo_model.layouts import CELL, Slot
from prism_server.demo_model.texts import GOODS, made_up_name
from prism_server.demo_model.turns import Turn

GLYPHS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz.-:"
GLYPH_INDEX = {character: index for index, character in enumerate(GLYPHS)}
HEAD_LINES = 4
"""Number, date, customer and seller stand above the items; the total stands below them."""
MIN_FONT, SMALLEST_FONT = 16, 12
"""Pixels: a page starts from at least the first and shrinks to the second when a line is too wide."""


class LineItem(NamedTuple):
    """`price` is the amount of the whole line, as printed."""

    quantity: int
    goods: str
    price: str


class Glyph(NamedTuple):
    """A character's middle in pixels, and its place in `GLYPHS`. A label for training."""

    x: float
    y: float
    glyph_index: int


@dataclass(frozen=True, slots=True)
class Invoice:
    """What an invoice says; the total is the sum of the prices."""

    number: str
    date: str
    customer: str
    seller: str
    items: tuple[LineItem, ...]

    @property
    def total(self) -> str:
        cents = sum(int(item.price.replace(".", "")) for item in self.items)
        return f"{cents // 100}.{cents % 100:02d}"

    @property
    def lines(self) -> tuple[str, ...]:
        return (
            f"INVOICE {self.number}",
            f"Date {self.date}",
            f"To {self.customer}",
            f"From {self.seller}",
            *(f"{item.quantity} {item.goods} {item.price}" for item in self.items),
            f"Total {self.total}",
        )

    def as_json(self) -> str:
        return json.dumps({"invoice": self.number, "date": self.date, "customer": self.customer, "total": self.total})


@dataclass(frozen=True, slots=True)
class Page:
    """An invoice and its picture."""

    slot: Slot
    invoice: Invoice
    glyphs: tuple[Glyph, ...] = field(repr=False)
    image: Image.Image = field(repr=False)

    def glyph_cells(self) -> npt.NDArray[np.bool_]:
        """Which characters have their middle in each vision token: bool [rows, columns, len(GLYPHS)]."""
        cells = np.zeros((self.slot.rows, self.slot.columns, len(GLYPHS)), np.bool_)
        for glyph in self.glyphs:
            row = min(int(glyph.y) // CELL, self.slot.rows - 1)
            column = min(int(glyph.x) // CELL, self.slot.columns - 1)
            cells[row, column, glyph.glyph_index] = True
        return cells

    def turn(self, rng: random.Random, where: str = "") -> Turn:
        """A question; `where` ("" or " on page 2") says which of several pages is meant."""
        (task,) = rng.choices(list(TASKS), [weight for weight, _ in TASKS.values()])
        item = rng.choice(self.invoice.items)
        _, ask = TASKS[task]
        question, answer = ask(self.invoice, item, rng, where)
        return Turn(task, question, answer)


def draw_page(rng: random.Random, slot: Slot) -> Page:
    """A page as large as `slot`, with as many items as it has room for, at most eight."""
    invoice = _invent(rng, most_items=max(1, min(8, (slot.height - 12) // 21 - 5)))
    paper = rng.choice([255, 255, 250, 242, 235])
    tint = (paper, paper, max(0, paper - rng.choice([0, 0, 12, 25])))
    image = Image.new("RGB", (slot.width, slot.height), tint)
    return Page(slot, invoice, _typeset(rng, ImageDraw.Draw(image), slot, invoice.lines), image)


def _invent(rng: random.Random, most_items: int) -> Invoice:
    number = f"{rng.randint(1000, 9999)}"
    date = f"20{rng.randint(20, 29)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"
    customer, seller = made_up_name(rng), made_up_name(rng)
    items = tuple(
        LineItem(rng.randint(1, 12), goods, f"{rng.randint(1, 99)}.{rng.randint(0, 99):02d}")
        for goods in rng.sample(GOODS, rng.randint(1, most_items))
    )
    return Invoice(number, date, customer, seller, items)


def _typeset(rng: random.Random, draw: ImageDraw.ImageDraw, slot: Slot, lines: tuple[str, ...]) -> tuple[Glyph, ...]:
    """Writes the lines where they fit, some items indented, sometimes a rule above the total."""
    size, widest = _fitting_font(rng, slot, lines)
    gaps = len(lines) - 1
    step = min(size * rng.uniform(1.15, 1.5), (slot.height - 8 - size) / gaps)
    y = rng.uniform(2, max(2.1, slot.height - 4 - step * gaps - size * 1.2))
    ink: RGB = (20, 20, 20) if rng.random() < 0.8 else jittered(rng, (40, 40, 90), 20)
    left = rng.uniform(3, max(3.1, slot.width - 4 - widest))
    glyphs: list[Glyph] = []
    for number, line in enumerate(lines):
        x = left
        if HEAD_LINES <= number < gaps and rng.random() < 0.15:
            x += rng.uniform(0, max(0, slot.width - 4 - left - text_width(size, line)))
        draw.text((x, y), line, fill=ink, font=font(size))
        glyphs += _glyphs_of(line, x, y, size)
        y += step
    if rng.random() < 0.1:
        rule = y - step * 0.98
        draw.line([(left, rule), (slot.width - 6, rule)], fill=ink)
    return tuple(glyphs)


def _fitting_font(rng: random.Random, slot: Slot, lines: tuple[str, ...]) -> tuple[int, float]:
    """A font size and the width of the widest line in it, both in pixels."""
    largest = max(MIN_FONT, min(23, int((slot.height - 10) / len(lines) / 1.15)))
    size = rng.randint(MIN_FONT, largest)
    while (widest := max(text_width(size, line) for line in lines)) > slot.width - 8 and size > SMALLEST_FONT:
        size -= 1
    return size, widest


def _glyphs_of(line: str, x: float, y: float, size: int) -> list[Glyph]:
    glyphs = []
    for character in line:
        width = advance(size, character)
        if character in GLYPH_INDEX:
            glyphs.append(Glyph(x + width / 2, y + size * 0.62, GLYPH_INDEX[character]))
        x += width
    return glyphs


Asked = tuple[str, str]
"""A question and its answer."""
Ask = Callable[[Invoice, LineItem, random.Random, str], Asked]


def _number(page: Invoice, _: LineItem, rng: random.Random, where: str) -> Asked:
    return rng.choice([f"What is the invoice number{where}?", f"Which invoice is this{where}?"]), page.number


def _date(page: Invoice, _: LineItem, rng: random.Random, where: str) -> Asked:
    return rng.choice([f"What is the date{where}?", f"When was the invoice written{where}?"]), page.date


def _customer(page: Invoice, _: LineItem, rng: random.Random, where: str) -> Asked:
    return rng.choice([f"Who is the customer{where}?", f"Who is the invoice for{where}?"]), page.customer


def _seller(page: Invoice, _: LineItem, rng: random.Random, where: str) -> Asked:
    return rng.choice([f"Who sent the invoice{where}?", f"Who is the seller{where}?"]), page.seller


def _total(page: Invoice, _: LineItem, rng: random.Random, where: str) -> Asked:
    return rng.choice([f"What is the total{where}?", f"How much is to be paid{where}?"]), page.total


def _quantity(_: Invoice, item: LineItem, rng: random.Random, where: str) -> Asked:
    return f"How many {item.goods} were bought{where}?", str(item.quantity)


def _price(_: Invoice, item: LineItem, rng: random.Random, where: str) -> Asked:
    wordings = (f"What is the price of the {item.goods}{where}?", f"How much do the {item.goods} cost{where}?")
    return rng.choice(wordings), item.price


def _line_count(page: Invoice, _: LineItem, rng: random.Random, where: str) -> Asked:
    return f"How many items are listed{where}?", str(len(page.items))


def _presence(page: Invoice, item: LineItem, rng: random.Random, where: str) -> Asked:
    if rng.random() < 0.5:
        return f"Are {item.goods} on the invoice{where}?", "yes"
    listed = {other.goods for other in page.items}
    return f"Are {rng.choice([goods for goods in GOODS if goods not in listed])} on the invoice{where}?", "no"


def _reading(page: Invoice, _: LineItem, rng: random.Random, where: str) -> Asked:
    return f"{rng.choice(['Read the page', 'Write out the page'])}{where}.", "\n".join(page.lines)


def _as_json(page: Invoice, _: LineItem, rng: random.Random, where: str) -> Asked:
    return f"Return the invoice{where} as JSON.", page.as_json()


TASKS: dict[str, tuple[int, Ask]] = {
    "number": (3, _number),
    "date": (3, _date),
    "customer": (3, _customer),
    "seller": (2, _seller),
    "total": (4, _total),
    "quantity": (4, _quantity),
    "price": (4, _price),
    "lines": (1, _line_count),
    "has": (2, _presence),
    "read": (2, _reading),
    "json": (2, _as_json),
}
"""How often each is asked, and how."""
