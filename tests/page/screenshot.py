"""`make screenshot`: the page as the README shows it, from a real server and a real browser.

    python tests/page/screenshot.py [DIRECTORY]

Writes page.png (light), page-dark.png and page-phone.png. The README's were made with Debian's fonts-inter installed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from page_browser import MISSING, chromium_path, finished, running_browser
from playwright.sync_api import Page

from prism_server.bench.demo import SERVER
from prism_server.bench.server_process import ServerProcess

IMAGES = Path(__file__).parents[2] / "docs" / "images"
SHOTS = {
    "page.png": {"viewport": {"width": 1240, "height": 900}, "device_scale_factor": 1.5, "color_scheme": "light"},
    "page-dark.png": {"viewport": {"width": 1240, "height": 900}, "device_scale_factor": 1.5, "color_scheme": "dark"},
    "page-phone.png": {"viewport": {"width": 360, "height": 720}, "device_scale_factor": 2, "is_mobile": True},
}
EXAMPLE = "Eight invoices"


def ask_two_questions(page: Page) -> None:
    """The first pays for the pictures, the second does not."""
    page.get_by_role("button", name=EXAMPLE).click()
    questions = page.locator(".suggestion")
    for index in range(2):
        questions.nth(index).click()
        finished(page, index + 1)
    page.wait_for_timeout(1000)  # until the bars have come to rest


def main(argv: Sequence[str]) -> int:
    browser_path = chromium_path()
    if browser_path is None:
        print(MISSING, file=sys.stderr)
        return 1
    directory = Path(argv[0]) if argv else IMAGES
    directory.mkdir(parents=True, exist_ok=True)
    with running_browser(browser_path) as browser:
        for name, look in SHOTS.items():
            with ServerProcess(SERVER) as server:  # a server for each: to which the pages are new
                page = browser.new_page(**look)
                page.goto(server.api_url)
                ask_two_questions(page)
                page.mouse.move(0, 0)
                page.screenshot(path=directory / name, full_page=not look.get("is_mobile", False))
                page.close()
            print(directory / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
