"""What a link may be and where it may lead: every spelling that hides another place is refused."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_server.media.addresses import may_fetch_from
from prism_server.media.link import MAX_LINK_CHARACTERS, LinkError, is_link, is_listed, parse_link


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("https://example.org", "https://example.org/"),
        ("HTTPS://Example.ORG:443/A.png#top", "https://example.org/A.png"),
        ("http://example.org:443/a", "http://example.org:443/a"),
        ("https://example.org?w=1&h=2", "https://example.org/?w=1&h=2"),
        ("https://example.org/a%20b/ä ö.png", "https://example.org/a%20b/%C3%A4%20%C3%B6.png"),
        ("https://example.org/a?to=https://other.org/@x", "https://example.org/a?to=https://other.org/@x"),
        ("https://xn--bcher-kva.example/", "https://xn--bcher-kva.example/"),
        ("https://8.8.8.8/a", "https://8.8.8.8/a"),
        ("https://[2606:4700::0:1111]:8443/a", "https://[2606:4700::1111]:8443/a"),
        ("https://a_b.example.org/", "https://a_b.example.org/"),
    ],
)
def test_a_link_has_one_spelling(text: str, canonical: str) -> None:
    assert is_link(text)
    link = parse_link(text)
    assert link.text == canonical
    assert parse_link(link.text) == link


@pytest.mark.parametrize(
    "text",
    [
        "https://",
        "https:///a",
        "https:example.org",
        "ftp://example.org/",
        "file:///etc/passwd",
        "https://user@example.org/",
        "https://user:password@example.org/",
        "https://example.org@169.254.169.254/",
        "https://example.org\\@169.254.169.254/",
        "https://example.org\\.evil.org/",
        "https://example.org:/",
        "https://example.org:0/",
        "https://example.org:65536/",
        "https://example.org:\uff14\uff14\uff13/",
        "https://example.org./",
        "https://169.254.169.254./",
        "https://.example.org/",
        "https://exa..mple.org/",
        "https://-a.org/",
        f"https://{'a' * 64}.org/",
        f"https://{'a.' * 130}org/",
        "https://2130706433/",
        "https://0x7f000001/",
        "https://0x7f.1/",
        "https://0177.0.0.1/",
        "https://127.1/",
        "https://127.0.0.01/",
        "https://127.0.0.1.2/",
        "https://1.2.3.256/",
        "https://[fe80::1%25eth0]/",
        "https://[127.0.0.1]/",
        "https://[::1",
        "https://bücher.example/",
        "https://ⓔxample.org/",
        "https://169。254。169。254/",
        "https://①②⑦.⓪.⓪.①/",
        "https://\u212aelvin.example/",
        "https://exam\u00adple.org/",
        "https://%65xample.org/",
        "https://example.org /",
        " https://example.org/",
        "https://example.org/a\nHost: b",
        "https://exa\tmple.org/",
        "https://example.org/\x00",
        "https://example.org/\ud800",
        "https://example.org/" + "a" * MAX_LINK_CHARACTERS,
    ],
)
def test_what_could_be_read_in_two_ways_is_refused(text: str) -> None:
    with pytest.raises(LinkError) as caught:
        parse_link(text)
    assert caught.value.failure == "refused"


@given(st.text(max_size=30), st.sampled_from(["https://", "http://", "https://a.org", "https://a.org/"]))
def test_any_text_is_a_link_in_its_one_spelling_or_refused(tail: str, head: str) -> None:
    try:
        link = parse_link(head + tail)
    except LinkError:
        return
    assert link.text.isascii()
    assert not set(link.text) & set(" \r\n\t\\")
    assert parse_link(link.text) == link


@pytest.mark.parametrize(
    ("location", "expected"),
    [
        ("/b.png", "https://example.org:8443/b.png"),
        ("c.png?x=1", "https://example.org:8443/a/c.png?x=1"),
        ("//other.org/d", "https://other.org/d"),
        ("http://other.org/d", "http://other.org/d"),
    ],
)
def test_a_redirect_is_read_from_where_it_stands(location: str, expected: str) -> None:
    assert parse_link("https://example.org:8443/a/b").redirected(location).text == expected


@pytest.mark.parametrize("location", ["file:///etc/passwd", "//user@other.org/", "//[::1", "gopher://a", "//0x7f.1/"])
def test_a_redirect_is_read_as_strictly(location: str) -> None:
    with pytest.raises(LinkError):
        parse_link("https://example.org/a").redirected(location)


@pytest.mark.parametrize(
    ("host", "rules", "listed"),
    [
        ("example.org", ("example.org",), True),
        ("example.org", ("other.org", "example.org"), True),
        ("a.example.org", ("example.org",), False),
        ("a.example.org", ("*.example.org",), True),
        ("a.b.example.org", ("*.example.org",), True),
        ("example.org", ("*.example.org",), False),
        ("badexample.org", ("*.example.org", "example.org"), False),
        ("example.org.evil.net", ("example.org", "*.example.org"), False),
        ("anything.at.all", ("*",), True),
        ("example.org", (), False),
    ],
)
def test_hosts_are_listed_whole_or_by_their_parent(host: str, rules: tuple[str, ...], listed: bool) -> None:
    assert is_listed(host, rules) is listed


NOWHERE = [
    *("0.0.0.0", "0.1.2.3", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254"),
    *("168.63.129.16", "169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.255", "192.0.0.192"),
    *("192.0.2.1", "192.88.99.1", "192.168.1.1", "198.18.0.1", "198.51.100.7", "203.0.113.9", "224.0.0.1"),
    *("239.255.255.250", "240.0.0.1", "255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:127.0.0.1"),
    *("::ffff:8.8.8.8", "64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b::a00:1", "64:ff9b:1::808:808"),
    *("100::1", "2001::1", "2001:0:7f00:1::", "2001:db8::1", "2002:7f00:1::", "2002:a9fe:a9fe::1", "3fff::1"),
    *("fc00::1", "fd00:ec2::254", "fd20:ce::254", "fe80::1", "fe80::1%eth0", "fec0::1", "ff02::1", "5f00::1"),
]


@pytest.mark.parametrize("text", NOWHERE)
def test_no_link_leads_to_an_address_that_is_not_public(text: str) -> None:
    assert not may_fetch_from(ip_address(text))


@pytest.mark.parametrize("text", ["8.8.8.8", "1.1.1.1", "172.32.0.1", "2606:4700::1111", "64:ff9b::808:808"])
def test_links_lead_to_public_addresses(text: str) -> None:
    assert may_fetch_from(ip_address(text))


@given(st.ip_addresses())
def test_what_is_allowed_is_what_python_too_holds_for_public(address: IPv4Address | IPv6Address) -> None:
    if may_fetch_from(address):
        assert address.is_global or address in ip_network("64:ff9b::/96")
        assert not any((address.is_multicast, address.is_loopback, address.is_link_local, address.is_unspecified))


def test_a_private_network_is_opened_by_name_metadata_never() -> None:
    networks = [ip_network("10.0.0.0/8"), ip_network("fd00::/8"), ip_network("0.0.0.0/0"), ip_network("::/0")]
    assert not may_fetch_from(ip_address("192.168.1.1"), networks[:2])
    for text in ("10.1.2.3", "fd00::1", "192.168.1.1"):
        assert may_fetch_from(ip_address(text), networks)
    for text in ("169.254.169.254", "100.100.100.200", "168.63.129.16", "fd00:ec2::254", "fe80::1", "::ffff:10.0.0.1"):
        assert not may_fetch_from(ip_address(text), networks)
