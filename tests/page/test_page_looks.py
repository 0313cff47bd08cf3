"""The page in narrow windows, in the dark, without movement; and that nothing on it comes from elsewhere."""

from __future__ import annotations

import io
from urllib.parse import urlsplit

import pytest
from page_browser import OpenPage, ask, bar_width, rows
from PIL import Image, ImageStat
from playwright.sync_api import Page, expect

from prism_server.bench.server_process import ServerProcess

PHONE = {"viewport": {"width": 320, "height": 568}, "is_mobile": True, "has_touch": True}
CONTRAST = """() => {
    const light = rgb => rgb.map(v => v / 255).map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const rgb = color => color.match(/[\\d.]+/g).map(Number);
    const ground = element => {
        for (let at = element; at; at = at.parentElement) {
            const color = rgb(getComputedStyle(at).backgroundColor);
            if (color.length < 4 || color[3] > 0.99) return color.slice(0, 3);
        }
    };
    const texts = [...document.querySelectorAll("body *")].filter(element => element.checkVisibility()
        && [...element.childNodes].some(node => node.nodeType === 3 && node.data.trim()));
    return texts.map(element => {
        const [a, b] = [light(rgb(getComputedStyle(element).color).slice(0, 3)), light(ground(element))];
        return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.outerHTML.slice(0, 80)];
    }).filter(([ratio]) => ratio < 4.5);
}"""


def with_answers(page: Page) -> None:
    """An example, and two questions about it."""
    page.get_by_role("button", name="Three pictures").click()
    expect(page.locator(".tile")).to_have_count(3)
    for question in ("In which picture is the red cross?", "How many pictures are there?"):
        ask(page, question)


def brightness(page: Page) -> float:
    """Of the screen, 0 to 255."""
    return ImageStat.Stat(Image.open(io.BytesIO(page.screenshot())).convert("L")).mean[0]


def test_a_phone_shows_all_of_it_without_scrolling_sideways(open_page: OpenPage) -> None:
    page = open_page(reduced_motion="reduce", **PHONE)  # so that bars have their widths at once
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    with_answers(page)
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    right_edges = "[...document.querySelectorAll('main *')].map(element => element.getBoundingClientRect().right)"
    assert max(page.evaluate(right_edges)) <= 320
    newest = page.locator(".entry").first
    assert bar_width(rows(newest)["reused"]) > 40
    small = """() => [...document.querySelectorAll("button")].filter(b => b.checkVisibility())
        .filter(b => Math.min(b.offsetWidth, b.offsetHeight) < 24).map(b => b.outerHTML)"""
    assert page.evaluate(small) == [], "a finger hits every button"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_can_be_read(open_page: OpenPage, scheme: str) -> None:
    page = open_page(color_scheme=scheme, reduced_motion="reduce")
    assert page.evaluate(CONTRAST) == []
    with_answers(page)
    assert page.evaluate(CONTRAST) == []
    assert (brightness(page) < 80) == (scheme == "dark")


def test_nothing_moves_for_those_who_do_not_want_it(open_page: OpenPage) -> None:
    page = open_page(reduced_motion="reduce")
    page.get_by_role("button", name="A clip").click()
    expect(page.locator(".tile canvas")).to_have_count(1)
    page.get_by_label("Question", exact=True).fill("Hello")
    page.keyboard.press("Enter")
    page.locator(".entry").wait_for()
    assert page.evaluate("document.getAnimations().length") == 0


def test_everything_comes_from_the_server_itself(open_page: OpenPage, page_server: ServerProcess) -> None:
    page = open_page()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.reload()
    with_answers(page)
    home = urlsplit(page_server.api_url).netloc
    assert len(asked) > 10
    assert {urlsplit(url).netloc for url in asked if not url.startswith("blob:")} == {home}


def test_the_policy_stops_scripts_that_are_not_files_of_the_page(open_page: OpenPage) -> None:
    page = open_page()
    inline = """() => {
        window.violations = 0;
        document.addEventListener("securitypolicyviolation", () => window.violations++);
        const script = document.createElement("script");
        script.textContent = "window.owned = true";
        document.head.append(script);
        const markup = "<img src='http://127.0.0.1:9/x.png' onerror='window.owned = true'>";
        document.body.insertAdjacentHTML("beforeend", markup);
    }"""
    page.evaluate(inline)
    page.wait_for_function("window.violations >= 2")
    assert page.evaluate("window.owned") is None
