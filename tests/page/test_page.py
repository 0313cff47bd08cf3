"""The page, driven in a real Chromium before a real server, as people use it."""

from __future__ import annotations

import random
import re

from page_browser import PASTE, OpenPage, ask, bar_width, carried, drop, finished, rows, shown
from playwright.sync_api import expect

from prism_server.demo_model import encode_jpeg, encode_png
from prism_server.demo_model.layouts import Slot
from prism_server.demo_model.pages import Page as Invoice
from prism_server.demo_model.pages import draw_page

PAGE = Slot(256, 320)
WATCH_ANSWER = """() => {
    window.lengths = [];
    const look = () => window.lengths.push(document.querySelector(".answer")?.textContent.length ?? 0);
    const all = { childList: true, characterData: true, subtree: true };
    new MutationObserver(look).observe(document.querySelector("#entries"), all);
}"""


def invoices(seed: int, count: int = 2) -> list[Invoice]:
    rng = random.Random(seed)
    return [draw_page(rng, PAGE) for _ in range(count)]


def test_two_dropped_pages_cost_their_first_question_and_nothing_after_that(open_page: OpenPage) -> None:
    page, pages = open_page(reduced_motion="reduce"), invoices(1)
    drop(page, *(carried(f"page-{i}.png", encode_png(drawn.image)) for i, drawn in enumerate(pages, 1)))
    page.evaluate(WATCH_ANSWER)

    first = ask(page, "Return the invoice on page 2 as JSON.")
    expect(first.locator(".answer")).to_have_text(pages[1].invoice.as_json())
    lengths = page.evaluate("window.lengths")
    assert lengths == sorted(lengths)
    assert len(set(lengths)) > 10, "the answer streams"
    said = rows(first)
    assert shown(said["decode"])[1] == shown(said["encode"])[1] == "2 pictures"
    assert shown(said["reused"])[0] == "nothing"
    assert all(bar_width(said[stage]) > 0 for stage in ("queue", "decode", "encode", "prefill", "first"))
    assert bar_width(said["reused"]) == 0
    assert "All 2 pictures were decoded, encoded and prefilled: 160 tokens." in first.inner_text()

    second = ask(page, "Who is the customer on page 1?")
    expect(second.locator(".answer")).to_have_text(pages[0].invoice.customer)
    said = rows(second)
    assert shown(said["decode"])[0] == shown(said["encode"])[0] == "nothing"
    assert bar_width(said["decode"]) == bar_width(said["encode"]) == 0
    reused, prompt = int(shown(said["reused"])[0]), shown(said["reused"])[1]
    total = int(re.findall(r"\d+", prompt)[0])
    assert 160 <= reused < total
    assert shown(said["prefill"])[1] == f"{total - reused} tokens"
    track = said["reused"].locator(".track").bounding_box()
    assert track is not None
    assert abs(bar_width(said["reused"]) / track["width"] - reused / total) < 0.01
    sentence = second.locator(".verdict").inner_text()
    assert sentence.startswith("This time no picture was decoded, encoded or prefilled.")
    expect(page.locator(".tile.is-known")).to_have_count(2)
    assert page.locator(".entry").first.locator("h3").inner_text().startswith("2"), "the newest stands on top"


def test_pictures_come_by_paste_and_by_choice_and_other_files_are_named(open_page: OpenPage) -> None:
    page, (pasted, chosen) = open_page(), invoices(3)
    page.evaluate(PASTE, carried("pasted.png", encode_png(pasted.image)))
    expect(page.locator(".tile")).to_have_count(1)
    with page.expect_file_chooser() as chooser:
        page.get_by_role("button", name="Choose files").click()
    files = [
        {"name": "chosen.jpg", "mimeType": "image/jpeg", "buffer": encode_jpeg(chosen.image)},
        {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"no picture"},
    ]
    chooser.value.set_files(files)
    expect(page.locator(".tile")).to_have_count(2)
    expect(page.get_by_role("alert")).to_contain_text("notes.txt is neither a picture nor a clip")
    entry = ask(page, "Who is the customer on page 2?")
    expect(entry.locator(".answer")).to_have_text(chosen.invoice.customer)


def test_an_example_and_its_question_are_answered_by_keyboard_alone(open_page: OpenPage) -> None:
    page = open_page()
    focused: list[str] = []
    for _ in range(20):
        page.keyboard.press("Tab")
        focused.append(page.evaluate("document.activeElement.innerText || document.activeElement.id"))
        if focused[-1] == "A scene":
            break
    assert focused[:2] == ["To the question", "Choose files"], "the focus goes as the eye does"
    assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.keyboard.press("Enter")
    expect(page.locator(".suggestion").first).to_be_visible()
    while page.evaluate("document.activeElement.className") != "suggestion":
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    entry = finished(page, 1)
    expect(entry.locator(".answer")).to_have_text("top left")
    expect(page.get_by_role("status").last).to_contain_text("Answer 1: top left")
    assert entry.locator(".answer").get_attribute("aria-live") == "polite"


def test_removing_by_keyboard_keeps_the_focus_on_the_page(open_page: OpenPage) -> None:
    page, pages = open_page(), invoices(4)
    drop(page, *(carried(f"page-{i}.png", encode_png(drawn.image)) for i, drawn in enumerate(pages, 1)))
    page.get_by_role("button", name="Remove page-1.png").focus()
    page.keyboard.press("Enter")
    expect(page.locator(".tile")).to_have_count(1)
    assert "page-2.png" in page.evaluate("document.activeElement.getAttribute('aria-label')")
    page.keyboard.press("Enter")
    expect(page.locator(".tile")).to_have_count(0)
    assert page.evaluate("document.activeElement.id") == "pick"


def test_every_control_has_a_name(open_page: OpenPage) -> None:
    page = open_page()
    page.get_by_role("button", name="A clip").click()
    expect(page.locator(".tile")).to_have_count(1)
    nameless = """() => [...document.querySelectorAll("button, input:not([hidden]), textarea, img:not([alt])")].filter(
        control => !(control.innerText || control.ariaLabel || control.labels?.length || control.alt)
    ).map(control => control.outerHTML)"""
    assert page.evaluate(nameless) == []
