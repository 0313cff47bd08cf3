"""One GET to addresses that are known already: no name is looked up twice, nothing followed, sent or unpacked unasked.

httpcore and not httpx: no cookies, proxies of the environment, redirects or decompression that would have to be off.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path

import certifi
import httpcore

from prism_server import __version__
from prism_server.errors import StartupError
from prism_server.media.addresses import IPAddress
from prism_server.media.link import Link, LinkError

HEADERS: tuple[tuple[str, str], ...] = (
    ("User-Agent", f"prism-server/{__version__}"),
    ("Accept", "*/*"),
    ("Accept-Encoding", "identity"),
    ("Connection", "close"),
)

Resolve = Callable[[str], Awaitable[Sequence[IPAddress]]]
"""Addresses of a name, best first. Raises OSError for a name that has none."""


def system_resolver(threads: Executor) -> Resolve:
    """The system's resolver, which blocks, in `threads`."""

    def look_up(name: str) -> list[IPAddress]:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        return list(dict.fromkeys(ip_address(entry[4][0]) for entry in found))

    async def resolve(name: str) -> list[IPAddress]:
        return await asyncio.get_running_loop().run_in_executor(threads, look_up, name)

    return resolve


def tls_context(ca_file: Path | None) -> ssl.SSLContext:
    """Certificates are checked against the public authorities and those of `ca_file`. Raises StartupError."""
    context = ssl.create_default_context(cafile=certifi.where())
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except OSError as error:  # ssl.SSLError is one
            raise StartupError(f"fetch.ca_file {ca_file}: cannot be read: {error.strerror or error}") from error
    return context


class Pinned(httpcore.AsyncNetworkBackend):
    """Connects to the first of `addresses` that answers, whatever host the request names."""

    def __init__(self, addresses: Sequence[IPAddress]) -> None:
        self._addresses = addresses
        self._network = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        failure: Exception = httpcore.ConnectError("no address")
        for address in self._addresses:
            try:
                return await self._network.connect_tcp(str(address), port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure


@asynccontextmanager
async def get(
    link: Link,
    addresses: Sequence[IPAddress],
    headers: Mapping[str, bytes],
    tls: ssl.SSLContext,
    connect_timeout_s: float,
) -> AsyncIterator[httpcore.Response]:
    """The answer, its body still to come, over a connection of its own to one of `addresses`.

    Host header, server name and certificate go by `link.host`. Only the way to the connection has a time limit here.
    Raises LinkError, while the body is read too.
    """
    url = httpcore.URL(scheme=link.scheme, host=link.host, port=link.port, target=link.target)
    said: list[tuple[bytes | str, bytes | str]] = [("Host", link.netloc), *HEADERS, *headers.items()]
    connection = httpcore.AsyncHTTPConnection(url.origin, ssl_context=tls, network_backend=Pinned(addresses))
    try:
        async with (
            connection,
            connection.stream(
                "GET", url, headers=said, extensions={"timeout": {"connect": connect_timeout_s}}
            ) as response,
        ):
            yield response
    except httpcore.ConnectError as error:
        if isinstance(error.__cause__, ssl.SSLError):
            raise LinkError("unreachable", "leads to a host whose certificate cannot be trusted") from error
        raise LinkError("unreachable", "leads to a host that cannot be reached") from error
    except httpcore.ConnectTimeout as error:
        raise LinkError("unreachable", "leads to a host that does not answer") from error
    except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError) as error:
        raise LinkError("broken", "leads to a host that broke off in its answer or does not speak HTTP") from error
