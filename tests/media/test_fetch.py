"""Links fetched over real connections: every hop under the rules, names looked up once, hosts that misbehave."""

from __future__ import annotations

import asyncio
import gzip
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from itertools import chain, cycle
from pathlib import Path
from typing import Any

import pytest
from fetching import BODY, HOST, Fetching, Names
from stand_in_web import Page, Piece, Site, always, answer, redirect, site

from prism_server.errors import BadRequest, StartupError
from prism_server.media.addresses import IPAddress
from prism_server.media.link import NamedLink
from prism_server.media.pinned_http import system_resolver


@pytest.fixture
def web() -> Iterator[Site]:
    with site() as served:
        yield served


def test_a_link_gives_the_bytes_whatever_they_are_called(web: Site) -> None:
    web.pages["/a?w=1"] = always(answer(BODY, content_type="text/html"))
    fetching = Fetching(web)
    assert fetching.now("/a?w=1#there") == BODY
    (asked,) = web.asked
    assert asked.headers["host"] == f"{HOST}:{web.port}"
    assert asked.headers["accept-encoding"] == "identity"
    assert not asked.headers.keys() & {"cookie", "authorization", "referer"}
    assert [(report.outcome, report.num_bytes) for report in fetching.reports] == [("fetched", len(BODY))]


@pytest.mark.parametrize(
    ("url", "settings"),
    [
        ("http://media.example.org:{port}/a", {"allow_http": False}),
        ("http://other.example.org:{port}/a", {}),
        ("http://media.example.org:1/a", {}),
        ("http://media.example.org:{port}/a", {"ports": ()}),
        ("http://127.0.0.1:{port}/a", {}),
        ("http://user@media.example.org:{port}/a", {}),
        ("http://2130706433:{port}/a", {"hosts": ("*",)}),
    ],
)
def test_what_the_rules_forbid_is_refused_before_a_name_is_looked_up(
    web: Site, url: str, settings: dict[str, Any]
) -> None:
    fetching = Fetching(web, **settings)
    fetching.refusal_of(url.format(port=web.port))
    assert (fetching.outcomes, fetching.names.asked, web.connections) == (["refused"], [], 0)


def test_one_bad_link_stops_the_others_before_they_are_asked_for(web: Site) -> None:
    web.pages["/a"] = always(answer(BODY))
    fetching = Fetching(web)
    links = [NamedLink(fetching.url("/a"), "first"), NamedLink("https://elsewhere.org/", "second")]
    with pytest.raises(BadRequest) as caught:
        asyncio.run(fetching.fetcher.fetch_all(links))
    assert (caught.value.param, web.connections) == ("second", 0)


@pytest.mark.parametrize(
    "addresses",
    ["127.0.0.1", "10.0.0.1", "169.254.169.254", "8.8.8.8 127.0.0.1", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1", ""],
)
def test_a_name_that_leads_to_a_private_address_is_refused_even_beside_a_public_one(web: Site, addresses: str) -> None:
    fetching = Fetching(web, Names(media_example_org=[addresses]), private_networks=())
    error = fetching.refusal("/a")
    assert (fetching.outcomes, web.connections) == (["refused"], 0)
    assert not any(text in error.reason for text in ("10.0", "169.", "::"))


def test_an_address_in_the_link_is_held_to_the_same_rules(web: Site) -> None:
    web.pages["/a"] = always(answer(BODY))
    opened = Fetching(web, hosts=("*",))
    assert asyncio.run(opened.get_url(opened.url("/a", "127.0.0.1"))) == BODY
    for host in ("169.254.169.254", "[::ffff:127.0.0.1]", "[fe80::1]", "10.0.0.1"):
        opened.refusal_of(opened.url("/a", host))
    assert opened.outcomes[1:] == ["refused"] * 4
    assert opened.names.asked == []


def test_a_name_is_looked_up_once_and_the_connection_goes_where_it_was_checked(web: Site) -> None:
    web.pages["/a"] = always(answer(BODY))
    names = Names(media_example_org=["127.0.0.1", "169.254.169.254"])
    fetching = Fetching(web, names)
    assert fetching.now("/a") == BODY
    assert names.asked == [HOST]
    fetching.refusal("/a")
    assert web.connections == 1


def test_an_address_that_does_not_answer_gives_way_to_the_next(web: Site) -> None:
    web.pages["/a"] = always(answer(BODY))
    assert Fetching(web, Names(media_example_org=["127.0.0.9 127.0.0.1"])).now("/a") == BODY


def test_a_name_that_is_not_there_and_a_port_that_is_closed_are_400(web: Site) -> None:
    fetching = Fetching(web, Names())
    assert "cannot be found" in fetching.refusal("/a").reason
    with socket.socket() as closed:  # nobody listens there, and nobody else can have the port
        closed.bind(("127.0.0.1", 0))
        fetching = Fetching(Site(port=closed.getsockname()[1]))
        assert "cannot be reached" in fetching.refusal("/a").reason
    assert fetching.outcomes == ["unreachable"]


def test_the_systems_resolver_is_asked_where_no_other_is_given() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert ip_address("127.0.0.1") in asyncio.run(resolved("localhost", threads))


async def resolved(name: str, threads: ThreadPoolExecutor) -> Sequence[IPAddress]:
    return await system_resolver(threads)(name)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirects_are_followed(web: Site, status: int) -> None:
    web.pages |= {"/a": redirect("/b", status), "/b": redirect("c", status), "/c": always(answer(BODY))}
    fetching = Fetching(web)
    assert fetching.now("/a") == BODY
    assert (web.paths, fetching.outcomes) == (["/a", "/b", "/c"], ["fetched"])


@pytest.mark.parametrize(
    ("location", "failure"),
    [
        ("http://169.254.169.254/latest/meta-data/", "refused"),
        ("http://media.example.org:1/", "refused"),
        ("http://internal.example.org:{port}/", "refused"),
        ("http://user@media.example.org:{port}/", "refused"),
        ("https://media.example.org/", "refused"),
        ("file:///etc/passwd", "refused"),
        ("gopher://media.example.org/", "refused"),
        ("//[", "refused"),
        ("", "broken"),
    ],
)
def test_every_hop_is_held_to_the_rules(web: Site, location: str, failure: str) -> None:
    web.pages["/a"] = redirect(location.format(port=web.port))
    fetching = Fetching(web)
    error = fetching.refusal("/a")
    assert (fetching.outcomes, web.paths) == ([failure], ["/a"])
    assert "internal" not in error.reason
    assert "169" not in error.reason


def test_a_hop_that_leads_to_another_address_is_refused(web: Site) -> None:
    web.pages["/a"] = redirect(f"http://b.example.org:{web.port}/b")
    names = Names(media_example_org=["127.0.0.1"], b_example_org=["10.0.0.1"])
    fetching = Fetching(web, names, hosts=("*.example.org",))
    fetching.refusal("/a")
    assert (fetching.outcomes, names.asked) == (["refused"], [HOST, "b.example.org"])


def test_a_redirect_takes_nothing_of_the_first_host_along(web: Site) -> None:
    """No cookie that it set, no referrer, no condition that was its own; the fragment stays at home."""
    target = f"http://b.example.org:{web.port}/b?x=1"
    web.pages |= {
        "/a": always(answer(status=302, location=f"{target}#there", set_cookie="id=1", etag='"a"')),
        "/b?x=1": always(answer(BODY, etag='"b"')),
    }
    names = Names(media_example_org=["127.0.0.1"], b_example_org=["127.0.0.1"])
    fetching = Fetching(web, names, hosts=("*.example.org",))
    assert [fetching.now("/a#here"), fetching.now("/a")] == [BODY, BODY]
    assert web.paths == ["/a", "/b?x=1"] * 2
    hosts = [asked.headers["host"] for asked in web.asked]
    assert hosts == [f"{HOST}:{web.port}", f"b.example.org:{web.port}"] * 2
    usual = {"host", "user-agent", "accept", "accept-encoding", "connection"}
    assert [asked.headers.keys() - usual for asked in web.asked] == [set(), set(), set(), {"if-none-match"}]


def test_a_length_that_is_too_small_ends_the_answer(web: Site) -> None:
    web.pages["/a"] = always(answer(BODY + b"more", content_length=str(len(BODY))))
    assert Fetching(web).now("/a") == BODY


def test_redirects_that_do_not_end_are_cut(web: Site) -> None:
    web.pages["/a"] = redirect("/a")
    fetching = Fetching(web, max_redirects=2)
    assert "more than 2 redirects" in fetching.refusal("/a").reason
    assert web.paths == ["/a"] * 3


ENDLESS: Sequence[Piece] = [b"HTTP/1.1 200 OK\r\n\r\n", *[bytes(1000)] * 10_000]


@pytest.mark.parametrize(
    ("page", "failure"),
    [
        (always(answer(b"not here", status=404)), "status"),
        (always(answer(b"secret stack trace", status=500)), "status"),
        (always(answer(status=204)), "status"),
        (always(answer(BODY, status=206)), "status"),
        (always(answer(status=304, content_length="")), "status"),
        (always(answer(BODY, content_length="999")), "broken"),
        (always(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\nhello\r\n"), "broken"),
        (always(b"SSH-2.0-OpenSSH_9.6\r\n"), "broken"),
        (always(answer(BODY, content_length="9" * 5000)), "broken"),
        (always(answer(BODY, content_length="-5")), "broken"),
        (always(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello!"), "broken"),
        (always(b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n"), "broken"),
        (always(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n-1\r\nhello\r\n0\r\n\r\n"), "broken"),
        (always(answer(BODY, content_encoding="br")), "broken"),
        (always(answer(BODY, content_encoding="identity, gzip")), "broken"),
        (always(b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 40_000), "broken"),
        (always(b""), "broken"),
        (always(answer(gzip.compress(bytes(10_000_000)), content_encoding="gzip")), "broken"),
        (always(answer(b"", content_length="100000000000")), "too_large"),
        (always(answer(bytes(5001))), "too_large"),
        (always(*ENDLESS), "too_large"),
        (always(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n", *[b"1\r\nx\r\n"] * 6000), "too_large"),
    ],
    ids=range(22),
)
def test_a_host_that_misbehaves_costs_one_400(web: Site, page: Page, failure: str) -> None:
    web.pages["/a"] = page
    fetching = Fetching(web, max_bytes=5000)
    error = fetching.refusal("/a")
    assert fetching.outcomes == [failure]
    assert "secret" not in error.reason
    web.pages["/a"] = always(answer(BODY))
    assert fetching.now("/a") == BODY


@pytest.mark.parametrize(
    "page",
    [
        lambda _: chain([answer(BODY, content_length="2000000")], cycle([0.05, b"x"])),
        lambda _: chain([b"HTTP/1.1 200 OK\r\nx: "], cycle([0.05, b"x"])),
        always(3600.0),
        lambda _: cycle([b"HTTP/1.1 100 Continue\r\n\r\n", 0.01]),
    ],
    ids=["drips its body", "drips its head", "says nothing", "goes on to continue"],
)
def test_a_host_that_takes_its_time_is_given_up(web: Site, page: Page) -> None:
    """None of them would ever come to an end."""
    web.pages["/a"] = page
    fetching = Fetching(web, total_timeout_s=0.5)
    assert "0.5 s" in fetching.refusal("/a").reason
    assert fetching.outcomes == ["timeout"]


def test_the_links_of_one_request_have_a_size_together(web: Site) -> None:
    web.pages |= {f"/{i}": always(answer(bytes([i]) * 1000)) for i in range(4)}
    fetching = Fetching(web, max_request_bytes=3000)

    def fetch(count: int) -> dict[str, bytes]:
        links = [NamedLink(fetching.url(f"/{i}"), f"p{i}") for i in range(count)]
        return asyncio.run(fetching.fetcher.fetch_all(links * 2))

    assert len(fetch(3)) == 3
    with pytest.raises(BadRequest, match="more than 3000 bytes"):
        fetch(4)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate of HOST, which is its own authority, and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("needs the openssl command to make a certificate")
    folder = tmp_path_factory.mktemp("tls")
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    made = f"req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN={HOST}"
    names = ["-addext", f"subjectAltName=DNS:{HOST}", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run([openssl, *made.split(), *names], check=True, capture_output=True)
    return certificate, key


@pytest.fixture
def safe_web(certificate: tuple[Path, Path]) -> Iterator[Site]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with site(context) as served:
        served.pages["/a"] = always(answer(BODY))
        yield served


def test_https_goes_by_the_links_name_and_a_certificate_that_is_trusted(
    safe_web: Site, certificate: tuple[Path, Path]
) -> None:
    names = Names(media_example_org=["127.0.0.1"], other_example_org=["127.0.0.1"])
    hosts = ("*.example.org",)
    trusting = Fetching(safe_web, names, hosts=hosts, allow_http=False, ca_file=certificate[0])
    assert asyncio.run(trusting.get_url(trusting.url("/a", scheme="https"))) == BODY
    assert safe_web.asked[0].headers["host"] == f"{HOST}:{safe_web.port}"
    assert "certificate" in trusting.refusal_of(trusting.url("/a", "other.example.org", "https")).reason
    wary = Fetching(safe_web, names, hosts=hosts, allow_http=False)
    assert "certificate" in wary.refusal_of(wary.url("/a", scheme="https")).reason
    assert safe_web.paths == ["/a"]


def test_authorities_that_cannot_be_read_stop_the_start(web: Site, tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    for name in ("missing.pem", "empty.pem"):
        with pytest.raises(StartupError, match=r"fetch\.ca_file"):
            Fetching(web, ca_file=tmp_path / name)
