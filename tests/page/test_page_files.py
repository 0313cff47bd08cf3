"""The page's files as server and router send them."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import httpx
import pytest

from prism_server.page import Site
from prism_server.page.site import FILES, PREFIX
from prism_server.serving.app import admin_app, api_app
from prism_server.serving.services import Services
from prism_server.settings import HTTPSettings, ServerSettings


def engine_services(**http: Any) -> Services:
    return Services.from_settings(ServerSettings(http=HTTPSettings(**http)))


def call(app: Any, path: str, method: str = "GET", **headers: str) -> httpx.Response:
    async def send() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, headers=headers)

    return asyncio.run(send())


def test_the_page_is_there_before_the_model_and_without_a_key(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret")
    app = api_app(engine_services(api_keys_file=keys))
    answer = call(app, "/")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert "<title>Prism</title>" in answer.text


def test_it_can_be_turned_off_and_is_not_on_the_admin_side() -> None:
    off = api_app(engine_services(page=False))
    assert [call(off, path).status_code for path in ("/", "/page/app.js")] == [404, 404]
    admin = admin_app(engine_services(), lambda: None)
    assert call(admin, "/").status_code == 404


@pytest.mark.parametrize("path", ["/page/", "/page/site.py", "/page/../settings.py", "/page/%2e%2e/settings.py", "/x"])
def test_nothing_but_its_files_is_sent(path: str) -> None:
    assert call(api_app(engine_services()), path).status_code == 404


def test_only_reading_is_allowed() -> None:
    app = api_app(engine_services())
    assert call(app, "/", "POST").status_code == 405
    head = call(app, "/page/page.css", "HEAD")
    assert (head.status_code, head.content) == (200, b"")
    assert int(head.headers["content-length"]) == len(call(app, "/page/page.css").content)


def test_a_client_that_has_a_file_is_not_sent_it_again() -> None:
    site = Site()
    first = call(site, "/page/app.js")
    again = call(site, "/page/app.js", **{"if-none-match": f'"other", {first.headers["etag"]}'})
    assert (first.status_code, again.status_code, again.content) == (200, 304, b"")
    assert call(site, "/page/app.js", **{"if-none-match": '"other"'}).status_code == 200
    assert first.headers["cache-control"] == "no-cache"


def test_every_file_carries_the_strict_policy() -> None:
    site = Site()
    for path in site.paths:
        headers = call(site, path).headers
        policy = dict(rule.split(" ", 1) for rule in headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert headers["x-content-type-options"] == "nosniff"


def test_the_page_has_nothing_inline_and_nothing_from_elsewhere() -> None:
    html = (FILES / "index.html").read_text("utf-8")
    assert not re.search(r"<style|\sstyle=|\son\w+=|javascript:", html)
    assert all(" src=" in tag for tag in re.findall(r"<script[^>]*>", html))
    sources = [file.read_text("utf-8") for file in FILES.iterdir() if file.suffix in (".html", ".js", ".css")]
    assert len(sources) > 8
    for source in sources:
        assert not re.search(r"https?://|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", source)


def test_every_file_that_is_named_is_there_and_every_script_is_used() -> None:
    html = (FILES / "index.html").read_text("utf-8")
    named = set(re.findall(r'(?:src|href)="page/([^"]+)"', html))
    scripts = {file.name for file in FILES.glob("*.js")}
    for script in scripts:
        named |= set(re.findall(r'from "\./([^"]+)"', (FILES / script).read_text("utf-8")))
    site = Site()
    assert all(PREFIX + name in site for name in named)
    assert scripts <= named
