"""Links as requests spell them, taken apart once, by one grammar: what was checked is what is asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address
from typing import Literal
from urllib.parse import quote, urljoin

from prism_server.errors import BadRequest, Overloaded, PrismError
from prism_server.media.addresses import IPAddress

SCHEMES = ("http://", "https://")
LONGEST_SCHEME = len("https://")
MAX_LINK_CHARACTERS = 8192
DEFAULT_PORTS = {"http": 80, "https": 443}

LINK = re.compile(r"(?P<scheme>https?)://(?P<authority>[^/?#]*)(?P<target>[^#]*)(?:#.*)?", re.IGNORECASE)
AUTHORITY = re.compile(r"(?:\[(?P<v6>[0-9a-f:.]+)\]|(?P<name>[a-z0-9._-]+))(?::(?P<port>[0-9]{1,5}))?")
LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
NAME = re.compile(rf"{LABEL}(?:\.{LABEL})*")
NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")
"""A last label like this makes a host an IPv4 address to some resolvers: 2130706433, 0x7f.1, 0177.0.0.1."""
UNQUOTED = "!$%&'()*+,-./:;=?@_~[]|"
"""Left as they are; `%` too, since a link may be quoted already."""

Failure = Literal["refused", "unreachable", "status", "too_large", "timeout", "broken", "busy"]
"""Why a link gave nothing. `refused`: by a rule of this server; `busy`: too many others are being fetched."""


class LinkError(Exception):
    """A link that gives nothing, whoever asked. `reason` ends a sentence that begins with "the link"."""

    def __init__(self, failure: Failure, reason: str) -> None:
        super().__init__(reason)
        self.failure: Failure = failure
        self.reason = reason

    def of_request(self, param: str) -> PrismError:
        """The error of the request that named it in `param`."""
        if self.failure == "busy":
            return Overloaded(f"{param}: the link {self.reason}")
        return BadRequest(f"the link {self.reason}", param, code=f"link_{self.failure}")


@dataclass(frozen=True, slots=True)
class NamedLink:
    """A link as a request spells it in its field `param`."""

    url: str
    param: str
    media_index: int | None = None
    """The medium that it is; None for a piece of one."""


@dataclass(frozen=True, slots=True)
class Link:
    """An http(s) link in its one spelling: no user, no fragment, all ASCII.

    `host`: lower case, an IPv6 address without brackets; `target`: path and query, quoted.
    """

    scheme: str
    host: str
    port: int
    target: str

    @property
    def netloc(self) -> str:
        """Host and, where it is not the scheme's own, port: as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == DEFAULT_PORTS[self.scheme] else f"{host}:{self.port}"

    @property
    def text(self) -> str:
        return f"{self.scheme}://{self.netloc}{self.target}"

    @property
    def address(self) -> IPAddress | None:
        """The host, if it is an address and no name."""
        try:
            return ip_address(self.host)
        except ValueError:
            return None

    def redirected(self, location: str) -> Link:
        """Where a Location header leads from here. Raises LinkError as `parse_link`."""
        try:
            return parse_link(urljoin(self.text, location))
        except ValueError:
            raise LinkError("refused", "cannot be read as http(s)://host/path") from None


def is_link(url: str) -> bool:
    return url[:LONGEST_SCHEME].lower().startswith(SCHEMES)


def parse_link(text: str) -> Link:
    """Raises LinkError for whatever could be read in two ways. The rest of a path may be Unicode, the host may not."""
    if len(text) > MAX_LINK_CHARACTERS:
        raise LinkError("refused", f"has more than {MAX_LINK_CHARACTERS} characters")
    matched = LINK.fullmatch(text)
    if matched is None or not text.isprintable() or "\\" in text:
        raise LinkError("refused", "cannot be read as http(s)://host/path")
    if "@" in matched["authority"]:
        raise LinkError("refused", "has a user or a password in it; this server sends none")
    scheme = matched["scheme"].lower()
    host, port = _host_and_port(matched["authority"], DEFAULT_PORTS[scheme])
    target = quote(matched["target"], safe=UNQUOTED)
    return Link(scheme, host, port, target if target.startswith("/") else f"/{target}")


def _host_and_port(authority: str, default_port: int) -> tuple[str, int]:
    matched = AUTHORITY.fullmatch(authority.lower()) if authority.isascii() else None
    if matched is None:
        raise LinkError("refused", "has a host that is neither a name in ASCII (xn--... for others) nor an address")
    port = int(matched["port"] or default_port)
    if not 1 <= port <= 65535:
        raise LinkError("refused", "has a port that there cannot be")
    return (_address(matched["v6"]) if matched["v6"] else _name(matched["name"])), port


def _address(text: str) -> str:
    try:
        return str(IPv6Address(text))
    except ValueError:
        raise LinkError("refused", "has brackets around something that is no IPv6 address") from None


def _name(host: str) -> str:
    if len(host) > 253 or not NAME.fullmatch(host):
        raise LinkError("refused", "has a host that is no proper name")
    if NUMBER.fullmatch(host.rpartition(".")[2]):
        try:
            return str(ip_address(host))
        except ValueError:
            raise LinkError("refused", "has a number for a host; an address is spelled 192.0.2.1") from None
    return host


def is_listed(host: str, rules: Sequence[str]) -> bool:
    """Whether `host` is one of the `rules`: itself, `*.` and a parent, or `*`. A parent does not list itself."""
    return any(rule in ("*", host) or (rule.startswith("*.") and host.endswith(rule[1:])) for rule in rules)
