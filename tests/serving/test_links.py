"""Media by link over HTTP: off unless hosts are listed; on, the same as if the bytes had been sent, for routers too."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from serving_support import ServerProcess, chat_body, eventually, image_part, noise, serving, url_part
from stand_in_web import Site, always, answer, as_long_as_unchanged, site

from prism_server.identity import Digest, content_id, link_digest
from prism_server.router.cache_answer import parse_cache
from prism_server.router.fleet import Fleet
from prism_server.router.media_size import MediaSizer
from prism_server.router.placement import Decision, decide
from prism_server.router.pods import Pod
from prism_server.router.request_keys import RequestKeys, read_request

PLACE = "messages[0].content[0].image_url.url"
TOTAL_TIMEOUT_S = 12


@pytest.fixture(scope="module")
def web() -> Iterator[Site]:
    with site() as served:
        yield served


@pytest.fixture(scope="module")
def fetching(web: Site) -> Iterator[ServerProcess]:
    options = {
        "fetch.hosts": "127.0.0.1",
        "fetch.allow_http": "true",
        "fetch.ports": str(web.port),
        "fetch.private_networks": "127.0.0.0/8",
        "fetch.total_timeout_s": str(TOTAL_TIMEOUT_S),
        "media.max_item_bytes": "200000",
        "kv.dtype": "fp32",  # answers to a picture and to its link are compared, one cold and one hot
    }
    with serving(**options) as running:
        yield running


def link(web: Site, path: str) -> str:
    return f"http://127.0.0.1:{web.port}{path}"


def cost(answered: Any) -> dict[str, Any]:
    assert answered.status_code == 200, answered.text
    return answered.json()["prism"]


def test_links_are_off_and_the_refusal_says_what_turns_them_on(server: ServerProcess) -> None:
    answered = server.chat(url_part("https://example.org/cat.png"), "What is it?")
    error = answered.json()["error"]
    assert (answered.status_code, error["param"], error["code"]) == (400, PLACE, "links_off")
    assert "fetch.hosts" in error["message"]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "/etc/passwd", "ftp://127.0.0.1/a.png", "gopher://127.0.0.1/"])
def test_nothing_but_http_is_a_link(fetching: ServerProcess, url: str) -> None:
    answered = fetching.chat(url_part(url), "What is it?")
    assert (answered.status_code, answered.json()["error"]["param"]) == (400, PLACE)


def test_a_link_is_the_picture_it_leads_to(fetching: ServerProcess, web: Site) -> None:
    picture, other = noise(501), noise(502)
    web.pages["/a.png"] = as_long_as_unchanged(picture, '"1"')
    sent = fetching.chat(image_part(picture), "What is it?")
    linked = fetching.chat(url_part(link(web, "/a.png")), "What is it?")
    assert linked.json()["choices"] == sent.json()["choices"]
    assert (cost(linked)["decoded_items"], cost(linked)["encoded_items"]) == (0, 0)
    assert cost(linked)["cached_media_tokens"] > 0
    mixed = fetching.chat(image_part(other), "and", url_part(link(web, "/a.png")), "What are they?")
    assert (
        mixed.json()["choices"]
        == fetching.chat(image_part(other), "and", image_part(picture), "What are they?").json()["choices"]
    )


def test_another_content_behind_the_same_link_finds_nothing_of_the_old_one(fetching: ServerProcess, web: Site) -> None:
    url = link(web, "/changing.png")
    web.pages["/changing.png"] = as_long_as_unchanged(noise(503), '"1"')
    assert cost(fetching.chat(url_part(url), "What is it?"))["encoded_items"] == 1
    assert cost(fetching.chat(url_part(url), "What is it?"))["encoded_items"] == 0
    web.pages["/changing.png"] = as_long_as_unchanged(noise(504), '"2"')
    again = cost(fetching.chat(url_part(url), "What is it?"))
    assert (again["encoded_items"], again["cached_media_tokens"]) == (1, 0)


@pytest.mark.parametrize(
    ("path", "body", "code"),
    [
        ("/missing.png", None, "link_status"),
        ("/page.png", b"<html>no picture</html>", None),
        ("/empty.png", b"", None),
        ("/half.png", noise(505)[:2000], None),
        ("/large.png", bytes(200_001), None),
    ],
)
def test_a_link_that_leads_to_no_picture_is_a_400_on_its_request(
    fetching: ServerProcess, web: Site, path: str, body: bytes | None, code: str | None
) -> None:
    if body is not None:
        web.pages[path] = always(answer(body, content_type="image/png"))
    for stream in (False, True):
        answered = fetching.chat(url_part(link(web, path)), "What is it?", stream=stream)
        error = answered.json()["error"]
        assert (answered.status_code, error["param"], error["code"]) == (400, PLACE, code)
        assert "html" not in error["message"]


def test_slow_links_hold_up_nobody_else(fetching: ServerProcess, web: Site) -> None:
    """More of them than there are threads that prepare."""
    for i in range(12):
        web.pages[f"/slow{i}"] = always(30.0)
    waiting = [
        threading.Thread(target=fetching.chat, args=(url_part(link(web, f"/slow{i}")), "What is it?"))
        for i in range(12)
    ]
    for thread in waiting:
        thread.start()
    eventually(lambda: fetching.capacity()["inside"] == 12, TOTAL_TIMEOUT_S / 2)
    assert fetching.chat(image_part(noise(506)), "What is it?", max_tokens=2).status_code == 200
    assert fetching.capacity()["inside"] >= 12  # the one that was answered may not have gone yet
    for thread in waiting:
        thread.join()
    assert fetching.metrics()["prism_link_fetches_total{timeout}"] >= 12


def test_a_client_that_leaves_ends_its_fetch(fetching: ServerProcess, web: Site) -> None:
    web.pages["/endless"] = always(30.0)
    body = msgspec.json.encode(chat_body(url_part(link(web, "/endless")), "What is it?"))
    with pytest.raises(Exception, match="timed out"):
        fetching.http.post(f"{fetching.api}/v1/chat/completions", content=body, timeout=0.3)
    eventually(fetching.is_idle, TOTAL_TIMEOUT_S / 2)  # long before the fetch would end by itself


def test_fetches_are_counted(fetching: ServerProcess, web: Site) -> None:
    web.pages["/counted.png"] = as_long_as_unchanged(noise(507), '"1"')
    before = fetching.metrics()
    for _ in range(2):
        fetching.chat(url_part(link(web, "/counted.png")), "What is it?", max_tokens=1)
    fetching.chat(url_part("http://elsewhere.org/"), "What is it?")
    after = fetching.metrics()
    gained = {name: after[name] - before.get(name, 0) for name in after if name.startswith("prism_link")}
    assert [gained[f"prism_link_fetches_total{{{outcome}}}"] for outcome in ("fetched", "unchanged", "refused")] == [
        1
    ] * 3
    assert gained["prism_link_fetch_bytes_total"] == len(noise(507))
    assert gained["prism_link_fetch_seconds_count"] == 2
    assert (gained["prism_link_cache_links"], gained["prism_link_cache_bytes"]) == (1, len(noise(507)))


def polled(server: ServerProcess, fleet: Fleet, uid: str) -> None:
    """One poll of the pod `uid` by a router."""
    place = fleet.position(uid)
    query = {} if place is None else {"epoch": place.epoch, "cursor": str(place.cursor)}
    body = server.http.get(f"{server.admin}/internal/cache", params=query).content
    fleet.apply(uid, parse_cache(body), 1000.0, 1000.0)


def test_a_router_sends_a_link_to_the_pod_that_holds_its_content(fetching: ServerProcess, web: Site) -> None:
    """By its text at first; by its content once a pod has said what it is, however it is sent then."""
    picture, path = noise(508), "/routed.png"
    web.pages[path] = as_long_as_unchanged(picture, '"1"')
    fleet = Fleet()
    fleet.set_pods([Pod("a", "uid-a"), Pod("b", "uid-b")], 0.0)
    for uid in ("uid-a", "uid-b"):
        polled(fetching, fleet, uid)
    sizer = MediaSizer()

    def keys(part: dict[str, Any]) -> RequestKeys:
        body = msgspec.json.encode(chat_body(part, "What is it?"))
        return read_request("/v1/chat/completions", body, fleet.schemes, sizer, fleet.content_of)

    def chosen(part: dict[str, Any]) -> Decision:
        decision = decide(fleet, keys(part), 2000.0)
        assert isinstance(decision, Decision)
        return decision

    linked = url_part(link(web, path))
    content: Digest = content_id("image", picture)
    assert keys(linked).media[0].name == link_digest(linked["image_url"]["url"])
    assert fetching.chat(linked, "What is it?").status_code == 200
    eventually(lambda: knows(fetching, content), 60.0)
    for holder in ("uid-b", "uid-a"):
        fleet = Fleet()
        fleet.set_pods([Pod("a", "uid-a"), Pod("b", "uid-b")], 0.0)
        polled(fetching, fleet, holder)
        assert keys(linked).media[0].name == content
        for part in (linked, image_part(picture)):
            assert (chosen(part).uid, chosen(part).cached_media) == (holder, 1)


def knows(server: ServerProcess, content: Digest) -> bool:
    return content in parse_cache(server.http.get(f"{server.admin}/internal/cache").content).features_added
