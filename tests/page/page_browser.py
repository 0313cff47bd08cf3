"""A real Chromium for the page's tests and its picture in the README."""

from __future__ import annotations

import base64
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = "no Chromium is installed: apt-get install chromium, or name one with PRISM_CHROMIUM=PATH"
PATIENCE_MS = 60_000
SMALL = {"model.threads": "1", "kv.memory_bytes": str(48 << 20)}
"""Options of a server for tests."""

expect.set_options(timeout=PATIENCE_MS)  # a machine under load is no failure

OpenPage = Callable[..., Page]

DROP = """files => {
    const carried = new DataTransfer();
    for (const [name, type, data] of files) {
        const bytes = Uint8Array.from(atob(data), character => character.charCodeAt(0));
        carried.items.add(new File([bytes], name, { type }));
    }
    const target = document.querySelector("#table .drop");
    for (const kind of ["dragenter", "dragover", "drop"])
        target.dispatchEvent(new DragEvent(kind, { bubbles: true, cancelable: true, dataTransfer: carried }));
}"""
PASTE = """([name, type, data]) => {
    const carried = new DataTransfer();
    const bytes = Uint8Array.from(atob(data), character => character.charCodeAt(0));
    carried.items.add(new File([bytes], name, { type }));
    document.dispatchEvent(new ClipboardEvent("paste", { bubbles: true, clipboardData: carried }));
}"""


def chromium_path() -> Path | None:
    """The browser of this machine, or None."""
    named = os.environ.get("PRISM_CHROMIUM")
    found = named or next(filter(None, map(shutil.which, NAMES)), None)
    return Path(found) if found else None


@contextmanager
def running_browser(path: Path) -> Iterator[Browser]:
    """Headless."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--disable-gpu"], timeout=2 * PATIENCE_MS)
        try:
            yield browser
        finally:
            browser.close()


def opening(browser: Browser, url: str) -> Iterator[OpenPage]:
    """Yields a function that opens the page at `url` in a context of its own; all are closed at the end.

    A script error on any of them fails at the end.
    """
    faults: list[str] = []
    contexts = []

    def open_page(url: str = url, **options: Any) -> Page:
        context = browser.new_context(**({"viewport": {"width": 1240, "height": 900}} | options))
        contexts.append(context)
        context.set_default_timeout(PATIENCE_MS)
        page = context.new_page()
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto(url)
        page.locator(".example").first.wait_for()
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def carried(name: str, data: bytes, media_type: str = "image/png") -> list[str]:
    """A file as `DROP` and `PASTE` take it."""
    return [name, media_type, base64.b64encode(data).decode()]


def drop(page: Page, *files: list[str]) -> None:
    """Until each has a tile: what a file is, the page finds out by reading it."""
    num_tiles = page.locator(".tile").count()
    page.evaluate(DROP, list(files))
    expect(page.locator(".tile")).to_have_count(num_tiles + len(files))


def ask(page: Page, question: str) -> Locator:
    """Types the question, sends it with Enter; its entry, once it is done."""
    number = page.locator(".entry").count() + 1
    page.get_by_label("Question", exact=True).fill(question)
    page.keyboard.press("Enter")
    return finished(page, number)


def finished(page: Page, number: int) -> Locator:
    """Entry `number`, counted from 1, once its answer has ended, well or not, and the next question can be asked.

    Between the last event of a stream and the end of the stream it is not open any more and says nothing yet.
    """
    entry = page.locator(f".entry:not(.is-open):has(#question-{number})")
    entry.locator(".verdict").wait_for()
    return entry


def rows(entry: Locator) -> Mapping[str, Locator]:
    """The bars of an entry by stage."""
    return {row.get_attribute("data-stage") or "": row for row in entry.locator(".row").all()}


def shown(row: Locator) -> tuple[str, str]:
    """What is written beside a bar."""
    return row.locator(".value").inner_text(), row.locator(".detail").inner_text()


def bar_width(row: Locator) -> float:
    """Pixels; 0 for a bar that is not shown."""
    bar = row.locator(".bar")
    box = bar.bounding_box() if bar.is_visible() else None
    return box["width"] if box else 0.0
