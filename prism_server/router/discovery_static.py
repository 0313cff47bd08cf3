"""Pods from a list, or from a DNS name."""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass
from urllib.parse import urlsplit

from prism_server.errors import StartupError
from prism_server.router.endpoints import Endpoint, OnEndpoints
from prism_server.router.upstream import Origin

DEFAULT_API_PORT = 8000
NO_ADDRESSES = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
"""No such name, or a name without addresses: which of them, depends on the DNS server."""

log = logging.getLogger(__name__)


def parse_backends(text: str, admin_port: int) -> tuple[Endpoint, ...]:
    """`http://a:8000,http://b:8000`; with an admin listener elsewhere, `http://a:8000|http://a:9001`.

    Without one it is the same host's `admin_port`. Raises StartupError.
    """
    endpoints: list[Endpoint] = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        api_url, _, admin_url = part.partition("|")
        api = _origin(api_url, DEFAULT_API_PORT)
        admin = _origin(admin_url, admin_port) if admin_url else Origin(api.host, admin_port)
        name = api.authority.decode()
        endpoints.append(Endpoint(name, name, None, api=api, admin=admin))
    if not endpoints:
        raise StartupError("discovery.backends names no pod")
    if len({endpoint.name for endpoint in endpoints}) < len(endpoints):
        raise StartupError(f"discovery.backends names one pod twice: {text}")
    return tuple(endpoints)


def _origin(url: str, default_port: int) -> Origin:
    """Of `http://host:port`. Raises StartupError."""
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        host, port = parts.hostname, parts.port or default_port
    except ValueError as error:
        raise StartupError(f"discovery.backends: {url!r}: {error}") from None
    if parts.scheme != "http" or not host or parts.path.strip("/") or parts.query:
        raise StartupError(f"discovery.backends: {url!r} must look like http://host:8000")
    return Origin(host, port)


@dataclass(frozen=True, slots=True)
class StaticDiscovery:
    """The pods of a list. Who is ready, they say themselves."""

    pods: tuple[Endpoint, ...]

    async def run(self, on_endpoints: OnEndpoints) -> None:
        on_endpoints(self.pods)
        await asyncio.get_running_loop().create_future()

    def age_s(self, now_s: float) -> float | None:
        return 0.0


class DnsDiscovery:
    """The addresses of a name, such as a headless Service's, asked for again and again.

    An address is all that DNS knows of a pod, so it is its name and its UID; the engine's epoch tells one pod behind
    it from the next.
    """

    def __init__(self, name: str, api_port: int, admin_port: int, every_s: float) -> None:
        self._name, self._api_port, self._admin_port, self._every_s = name, api_port, admin_port, every_s
        self._confirmed_s: float | None = None

    async def run(self, on_endpoints: OnEndpoints) -> None:
        before: list[str] | None = None
        while True:
            try:
                addresses = await self._addresses()
            except OSError as error:
                log.warning("discovery.dns_name %s: %s; the last pods stand", self._name, error)
            else:
                self._confirmed_s = asyncio.get_running_loop().time()
                if addresses != before:
                    before = addresses
                    on_endpoints([self._endpoint(address) for address in addresses])
            await asyncio.sleep(self._every_s)

    def age_s(self, now_s: float) -> float | None:
        """Up to one interval is no age."""
        return None if self._confirmed_s is None else max(0.0, now_s - self._confirmed_s - self._every_s)

    async def _addresses(self) -> list[str]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(self._name, self._api_port, type=socket.SOCK_STREAM)
        except socket.gaierror as error:
            if error.errno not in NO_ADDRESSES:
                raise
            return []  # a Service without pods
        families = {family for family, *_ in found}
        family = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6  # of both: each pod once
        return sorted({str(address[0]) for known, *_, address in found if known == family})

    def _endpoint(self, address: str) -> Endpoint:
        api, admin = Origin(address, self._api_port), Origin(address, self._admin_port)
        return Endpoint(address, address, None, api=api, admin=admin)
