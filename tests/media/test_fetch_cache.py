"""What is kept of links: asked about again, believed for a while, held once by content, within a capacity."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from stand_in_web import Page, Site, always, answer, as_long_as_unchanged, redirect, site

from prism_server.media.fetch import LinkFetcher
from prism_server.media.link import NamedLink
from prism_server.media.link_cache import Body, Kept, LinkCache
from prism_server.media.link_headers import AnswerHeaders
from prism_server.settings import FetchSettings

A, B = b"a" * 1000, b"b" * 1000


class Reader:
    """Fetches from the stand-in, one link at a time."""

    def __init__(self, web: Site, **settings: Any) -> None:
        self.outcomes: list[str] = []
        self.web = web
        given = {
            "hosts": ("127.0.0.1",),
            "allow_http": True,
            "ports": (web.port,),
            "private_networks": ("127.0.0.0/8",),
        }
        rules = FetchSettings.model_validate(given | settings)
        self.fetcher = LinkFetcher(rules, lambda report: self.outcomes.append(report.outcome))

    def get(self, path: str) -> bytes:
        url = f"http://127.0.0.1:{self.web.port}{path}"
        return asyncio.run(self.fetcher.fetch_all([NamedLink(url, "messages")]))[url]


@pytest.fixture
def web() -> Iterator[Site]:
    with site() as served:
        yield served


def test_what_is_kept_is_asked_about_and_not_sent_again(web: Site) -> None:
    web.pages["/a"] = as_long_as_unchanged(A, '"1"')
    reader = Reader(web)
    assert [reader.get("/a") for _ in range(3)] == [A] * 3
    assert reader.outcomes == ["fetched", "unchanged", "unchanged"]
    web.pages["/a"] = as_long_as_unchanged(B, '"2"')
    assert [reader.get("/a") for _ in range(2)] == [B] * 2
    assert reader.outcomes[3:] == ["fetched", "unchanged"]


def test_a_date_does_where_there_is_no_tag(web: Site) -> None:
    date = "Wed, 21 Oct 2026 07:28:00 GMT"
    web.pages["/a"] = lambda asked: [
        answer(status=304, content_length="") if "if-modified-since" in asked.headers else answer(A, last_modified=date)
    ]
    reader = Reader(web)
    assert [reader.get("/a") for _ in range(2)] == [A, A]
    assert web.asked[1].headers["if-modified-since"] == date.lower()
    assert reader.outcomes == ["fetched", "unchanged"]


@pytest.mark.parametrize(
    ("page", "settings", "outcomes"),
    [
        (always(answer(A, cache_control="max-age=60")), {}, ["fetched", "fresh"]),
        (always(answer(A, cache_control="public, MAX-AGE=60", age="20")), {}, ["fetched", "fresh"]),
        (always(answer(A, cache_control="max-age=60", age="60")), {}, ["fetched", "fetched"]),
        (always(answer(A, cache_control="max-age=60, no-cache")), {}, ["fetched", "fetched"]),
        (always(answer(A, cache_control="max-age=60, no-store", etag='"1"')), {}, ["fetched", "fetched"]),
        (always(answer(A, cache_control="private, max-age=60", etag='"1"')), {}, ["fetched", "fetched"]),
        (always(answer(A, cache_control="max-age=never")), {}, ["fetched", "fetched"]),
        (always(answer(A, cache_control="max-age=" + "9" * 5000)), {}, ["fetched", "fresh"]),
        (always(answer(A, expires="Thu, 01 Jan 2099 00:00:00 GMT")), {}, ["fetched", "fetched"]),
        (always(answer(A, cache_control="max-age=60")), {"max_fresh_s": 0}, ["fetched", "fetched"]),
        (always(answer(A, cache_control="max-age=60")), {"cache_bytes": 0}, ["fetched", "fetched"]),
        (always(answer(A, cache_control="max-age=60")), {"cache_bytes": 999}, ["fetched", "fetched"]),
        (as_long_as_unchanged(A, '"1"', cache_control="max-age=60"), {}, ["fetched", "fresh"]),
        (as_long_as_unchanged(A, '"' + "x" * 2000 + '"'), {}, ["fetched", "fetched"]),
    ],
    ids=range(14),
)
def test_an_answer_is_believed_as_long_as_it_says_and_the_server_allows(
    web: Site, page: Page, settings: dict[str, Any], outcomes: list[str]
) -> None:
    web.pages["/a"] = page
    reader = Reader(web, **settings)
    assert [reader.get("/a") for _ in range(2)] == [A, A]
    assert reader.outcomes == outcomes


def test_freshness_ends_at_the_servers_bound(web: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 1000
    monkeypatch.setattr("prism_server.media.fetch.time", SimpleNamespace(monotonic=lambda: now_s))
    web.pages["/a"] = as_long_as_unchanged(A, '"1"', cache_control="max-age=1000000")
    reader = Reader(web, max_fresh_s=4)
    for later_s in (0, 3, 1, 3):
        now_s += later_s
        assert reader.get("/a") == A
    assert reader.outcomes == ["fetched", "fresh", "unchanged", "fresh"]


def test_redirects_are_walked_again_and_their_end_is_asked_about(web: Site) -> None:
    web.pages |= {"/a": redirect("/b", 301), "/b": as_long_as_unchanged(A, '"1"', cache_control="max-age=60")}
    reader = Reader(web)
    assert [reader.get("/a") for _ in range(2)] == [A, A]
    assert (web.paths, reader.outcomes) == (["/a", "/b"] * 2, ["fetched", "unchanged"])
    assert "if-none-match" not in web.asked[2].headers
    web.pages |= {"/a": redirect("/c"), "/c": as_long_as_unchanged(B, '"1"')}
    assert reader.get("/a") == B
    assert "if-none-match" not in web.asked[5].headers


def test_a_304_that_nobody_asked_for_is_no_content(web: Site) -> None:
    web.pages |= {"/a": always(answer(A, cache_control="max-age=60"))}
    reader = Reader(web)
    reader.get("/a")
    web.pages["/b"] = always(answer(status=304, content_length=""))
    with pytest.raises(Exception, match="status 304"):
        reader.get("/b")


def kept(data: bytes, source: str = "s") -> Kept:
    return Kept(Body(data, hashlib.sha256(data).digest()), source, b'"1"', None, 0.0)


def test_equal_content_is_held_once() -> None:
    cache = LinkCache(2500)
    for i in range(10):
        cache.put(f"link{i}", kept(bytes(A)))
    cache.put("other", kept(B))
    stats = cache.stats()
    assert (stats.links_now, stats.bytes_now, stats.evictions) == (11, 2000, 0)
    bodies = {id(found.body.data) for i in range(10) if (found := cache.get(f"link{i}"))}
    assert len(bodies) == 1
    for i in range(10):
        cache.drop(f"link{i}")
    assert cache.stats().bytes_now == 1000


def test_the_least_recently_used_leaves_first() -> None:
    cache = LinkCache(2000)
    cache.put("a", kept(A))
    cache.put("b", kept(B))
    cache.get("a")
    cache.put("c", kept(b"c" * 1000))
    assert [cache.get(name) is not None for name in "abc"] == [True, False, True]
    assert (cache.stats().bytes_now, cache.stats().evictions) == (2000, 1)


def test_a_cache_of_one_link_and_one_of_nothing() -> None:
    cache = LinkCache(10_000, max_links=1)
    cache.put("a", kept(A))
    cache.put("b", kept(A))
    assert (cache.get("a"), cache.stats().links_now, cache.stats().bytes_now) == (None, 1, 1000)
    cache.put("b", kept(b"x" * 10_001))
    assert (cache.get("b"), cache.stats().bytes_now) == (None, 0)
    nothing = LinkCache(0)
    nothing.put("a", kept(A))
    assert nothing.stats().links_now == 0
    with pytest.raises(ValueError):
        LinkCache(-1)


def test_headers_are_read_leniently_and_never_trusted_for_numbers() -> None:
    said = AnswerHeaders([(b"Cache-Control", b"max-age=10"), (b"cache-control", b'x="a, no-store'), (b"Age", b"-5")])
    assert (said.fresh_s, said.may_be_kept) == (10, False)
    assert AnswerHeaders([(b"Location", b"\xff")]).location is None
    assert AnswerHeaders([(b"Content-Length", b"\xb2")]).content_length == 0
    many = b"9" * 5000  # digits: more than Python makes a number of
    assert AnswerHeaders([(b"Cache-Control", b"max-age=" + many)]).fresh_s >= 10**9
    assert AnswerHeaders([(b"Cache-Control", b"max-age=5"), (b"Age", many)]).fresh_s == 0
    assert AnswerHeaders([(b"Content-Length", many)]).content_length >= 10**9
