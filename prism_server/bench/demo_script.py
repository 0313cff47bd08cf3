"""What the demo asks: eight invoice pages, questions about them, and what each may cost."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

from prism_server.demo_model import Turn, encode_png
from prism_server.demo_model.layouts import Slot
from prism_server.demo_model.pages import Page, draw_page
from prism_server.engine.messages import Usage

SEED = 8
NUM_PAGES = 8
PAGE = Slot(256, 320)
MAX_ANSWER_TOKENS = 160


@dataclass(frozen=True, slots=True)
class Cost:
    """What a request may cost: pictures decoded, pictures encoded, media tokens prefilled."""

    decoded: int
    encoded: int
    media_tokens: int

    @classmethod
    def of(cls, usage: Usage) -> Cost:
        return cls(usage.decoded_items, usage.encoded_items, usage.prefilled_media_tokens)


NOTHING = Cost(0, 0, 0)


@dataclass(frozen=True, slots=True)
class Step:
    """One request: its pages in order, a question with the answer that is printed on them, the cost."""

    title: str
    pages: tuple[Page, ...] = field(repr=False)
    turn: Turn
    cost: Cost

    @property
    def pictures(self) -> list[bytes]:
        return [encode_png(page.image) for page in self.pages]


def warm_up() -> Step:
    """A page that the demo does not show again: the first use of every operator is not charged to the first step."""
    page = draw_page(random.Random(SEED + 1), PAGE)
    turn = Turn("total", "What is the total?", page.invoice.total)
    return Step("warm-up", (page,), turn, Cost(1, 1, PAGE.num_tokens))


def script() -> list[Step]:
    """The same steps every time. A page's KV depends on all that stands before it, so that a changed page costs itself
    and those behind it their prefill, but of those nothing is decoded or encoded again."""
    rng = random.Random(SEED)
    pages = tuple(draw_page(rng, PAGE) for _ in range(NUM_PAGES))
    new = draw_page(rng, PAGE)
    changed = (*pages[:4], new, *pages[5:])
    swapped = (*pages[:6], pages[7], pages[6])
    invoices = [page.invoice for page in pages]
    tokens = PAGE.num_tokens
    as_json = Turn("json", "Return the invoice on page 3 as JSON.", invoices[2].as_json())
    seller = Turn("seller", "Who sent the invoice on page 7?", invoices[6].seller)
    total_of = Turn("of", f"What is the total of invoice {invoices[0].number}?", invoices[0].total)
    new_date = Turn("date", "What is the date on page 5?", new.invoice.date)
    total = Turn("total", "What is the total on page 6?", invoices[5].total)
    swapped_date = Turn("date", "What is the date on page 8?", invoices[6].date)
    number = Turn("number", "What is the invoice number on page 5?", invoices[4].number)
    return [
        Step("eight new pages", pages, as_json, Cost(8, 8, 8 * tokens)),
        Step("the same pages", pages, seller, NOTHING),
        Step("the same pages", pages, total_of, NOTHING),
        Step("page 5 is another", changed, new_date, Cost(1, 1, 4 * tokens)),
        Step("the same as before", changed, total, NOTHING),
        Step("pages 7 and 8 swapped", swapped, swapped_date, Cost(0, 0, 2 * tokens)),
        Step("the first eight again", pages, number, NOTHING),
        Step("the first question again", pages, as_json, NOTHING),
    ]
