"""One server and one browser for the page's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from page_browser import MISSING, SMALL, OpenPage, chromium_path, opening, running_browser
from playwright.sync_api import Browser

from prism_server.bench.server_process import ServerProcess


@pytest.fixture(scope="session")
def page_server() -> Iterator[ServerProcess]:
    with ServerProcess(SMALL) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for longer: while it runs an event loop runs in this thread, and no other test could have its own."""
    path = chromium_path()
    if path is None and os.environ.get("CI"):
        pytest.fail(f"{MISSING}; continuous integration does not go without it")
    if path is None:
        pytest.skip(f"THE PAGE IS NOT TESTED: {MISSING}")
    with running_browser(path) as running:
        yield running


@pytest.fixture
def open_page(browser: Browser, page_server: ServerProcess) -> Iterator[OpenPage]:
    """`open_page()` is the page in a tab of its own; options are those of a browser context."""
    yield from opening(browser, page_server.api_url)
