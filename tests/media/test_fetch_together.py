"""Many fetches at a time: one for all who ask, so many and no more, nobody held up by another."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress

import pytest
from fetching import BODY, Fetching
from stand_in_web import Asked, Piece, Site, always, answer, site

from prism_server.errors import BadRequest, Overloaded
from prism_server.media.link import NamedLink


@pytest.fixture
def web() -> Iterator[Site]:
    with site() as served:
        yield served


def test_one_request_names_so_many_different_links(web: Site) -> None:
    web.pages |= {f"/{i}": always(answer(BODY)) for i in range(3)}
    fetching = Fetching(web, max_request_links=2)
    links = [NamedLink(fetching.url(f"/{i}"), f"p{i}") for i in range(3)]
    assert len(asyncio.run(fetching.fetcher.fetch_all(links[:2] * 3))) == 2
    with pytest.raises(BadRequest, match="3 links") as caught:
        asyncio.run(fetching.fetcher.fetch_all(links))
    assert (caught.value.param, web.connections) == ("p2", 2)


def test_who_asks_for_a_link_that_is_being_fetched_waits_for_it(web: Site) -> None:
    web.pages["/a"] = always(0.2, answer(BODY))
    fetching = Fetching(web)

    async def ask() -> list[bytes]:
        return await asyncio.gather(*(fetching.get("/a") for _ in range(8)))

    assert asyncio.run(ask()) == [BODY] * 8
    assert (web.paths, fetching.outcomes) == (["/a"], ["fetched"])


def test_a_failure_reaches_all_who_wait_and_is_not_kept(web: Site) -> None:
    web.pages["/a"] = always(0.1, answer(status=503))
    fetching = Fetching(web)

    async def ask() -> list[bytes | BaseException]:
        return await asyncio.gather(*(fetching.get("/a") for _ in range(3)), return_exceptions=True)

    assert [type(error) for error in asyncio.run(ask())] == [BadRequest] * 3
    web.pages["/a"] = always(answer(BODY))
    assert fetching.now("/a") == BODY


def test_one_who_leaves_takes_nothing_from_the_others_the_last_one_ends_the_fetch(web: Site) -> None:
    left = threading.Event()

    def page(_: Asked) -> Iterable[Piece]:
        while not left.is_set():
            yield 0.01
        yield answer(BODY)

    web.pages["/a"] = page
    fetching = Fetching(web, concurrency=1)

    async def two() -> bytes:
        first, second = (asyncio.create_task(fetching.get("/a")) for _ in range(2))
        while "/a" not in web.paths:
            await asyncio.sleep(0.01)
        first.cancel()
        with suppress(asyncio.CancelledError):
            await first
        left.set()
        return await second

    assert asyncio.run(two()) == BODY
    web.pages["/b"] = always(3600.0)

    async def gone() -> bytes:
        only = asyncio.create_task(fetching.get("/b"))
        while "/b" not in web.paths:
            await asyncio.sleep(0.01)
        only.cancel()
        with suppress(asyncio.CancelledError):
            await only
        web.pages["/b"] = always(answer(BODY))
        return await fetching.get("/b")

    assert asyncio.run(gone()) == BODY
    assert web.paths == ["/a", "/b", "/b"]
    assert fetching.outcomes == ["fetched", "fetched"], "the one that was left did not run out of time"


def test_so_many_at_a_time_and_no_more(web: Site) -> None:
    inside = most = 0

    def page(_: Asked) -> Iterable[Piece]:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        while most < 2:
            yield 0.01
        yield 0.2  # for a third, if one could come
        inside -= 1
        yield answer(BODY)

    web.pages |= {f"/{i}": page for i in range(6)}
    fetching = Fetching(web, concurrency=2)

    async def ask() -> None:
        await asyncio.gather(*(fetching.get(f"/{i}") for i in range(6)))

    asyncio.run(ask())
    assert most == 2


def test_who_gets_no_turn_in_time_is_told_to_come_again(web: Site) -> None:
    """Two who have come before take the one place after each other; the second keeps it for all of its time."""
    go_on = threading.Event()

    def page(_: Asked) -> Iterable[Piece]:
        while not go_on.is_set():
            yield 0.01
        yield answer(BODY)

    web.pages |= {"/first": page, "/second": always(3600.0), "/a": always(answer(BODY))}
    fetching = Fetching(web, concurrency=1, total_timeout_s=2.0)

    async def ask() -> None:
        first, second, late = (asyncio.create_task(fetching.get(path)) for path in ("/first", "/second", "/a"))
        await asyncio.sleep(0.05)  # so that the second's time begins after that of the last
        go_on.set()
        with pytest.raises(Overloaded):
            await late
        await asyncio.gather(first, second, return_exceptions=True)

    asyncio.run(ask())
    assert fetching.outcomes == ["fetched", "busy", "timeout"]
    assert web.paths == ["/first", "/second"]


def test_a_loop_that_fetches_goes_on(web: Site) -> None:
    """A host that sends byte by byte, and a body of some size, do not keep other coroutines waiting."""
    web.pages["/a"] = always(
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", b"1\r\nx\r\n" * 20_000, b"0\r\n\r\n"
    )
    fetching = Fetching(web)

    async def turns() -> int:
        fetch = asyncio.create_task(fetching.get("/a"))
        count = 0
        while not fetch.done():
            await asyncio.sleep(0)
            count += 1
        assert await fetch == b"x" * 20_000
        return count

    assert asyncio.run(turns()) > 10_000
