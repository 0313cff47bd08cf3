"""Pods from the EndpointSlices of a Service, followed by a watch on the Kubernetes API: plain HTTP, no client library.

`list` says what there is, `watch` what changes from that version on. A version that the API server has forgotten (410)
is listed anew. While the API server does not answer, the last pods stand.
"""

from __future__ import annotations

import asyncio
import logging
import random
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import msgspec

from prism_server.errors import StartupError
from prism_server.router.endpoints import Endpoint, OnEndpoints
from prism_server.router.upstream import Connection, Origin, UpstreamError, connect, request_head

WATCH_S = 60
"""A watch is asked for anew this often, so that a broken one cannot go unnoticed for long."""
ANSWER_TIMEOUT_S = 10.0
SLACK_S = 15.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 15.0
GONE = 410

log = logging.getLogger(__name__)

Json = Mapping[str, Any]


class ListAgain(Exception):
    """The API server has forgotten the version that the watch began with."""


@dataclass(frozen=True, slots=True)
class KubernetesApi:
    """How to reach the API server from inside a pod."""

    url: str
    credentials: Path
    """Directory with `token` and `ca.crt`; both are read anew for each connection, since they rotate."""

    async def get(self, target: str, quiet_s: float) -> AsyncGenerator[bytes, None]:
        """The answer to a GET, piece by piece. `quiet_s` is the longest wait for a piece.

        Raises UpstreamError, TimeoutError, OSError.
        """
        connection = await connect(self._origin(), ANSWER_TIMEOUT_S)
        try:
            connection.send(request_head("GET", target.encode(), self._origin(), self._headers(), None))
            async with asyncio.timeout(ANSWER_TIMEOUT_S):
                head = await connection.head()
            assert head is not None
            if head.status == GONE:
                raise ListAgain
            if head.status != 200:
                raise UpstreamError(f"HTTP {head.status}: {await self._reason(connection)}")
            while True:
                async with asyncio.timeout(quiet_s):
                    piece = await connection.read()
                if piece is None:
                    return
                yield piece
        finally:
            connection.abort()

    async def _reason(self, connection: Connection) -> str:
        async with asyncio.timeout(ANSWER_TIMEOUT_S):
            return (await connection.rest())[:200].decode("utf-8", "replace")

    def _origin(self) -> Origin:
        parts = urlsplit(self.url)
        if not parts.hostname:
            raise StartupError(f"discovery.kubernetes_url {self.url!r} is no URL")
        if parts.scheme == "http":
            return Origin(parts.hostname, parts.port or 80)
        trusted = self.credentials / "ca.crt"
        context = ssl.create_default_context(cafile=str(trusted) if trusted.exists() else None)
        return Origin(parts.hostname, parts.port or 443, context)

    def _headers(self) -> list[tuple[bytes, bytes]]:
        token = self.credentials / "token"
        headers = [(b"accept", b"application/json"), (b"user-agent", b"prism-router")]
        if token.exists():
            headers.append((b"authorization", b"Bearer " + token.read_bytes().strip()))
        return headers


class KubernetesDiscovery:
    """Follows the EndpointSlices of `service` in `namespace`."""

    def __init__(self, api: KubernetesApi, namespace: str, service: str, api_port: int, admin_port: int) -> None:
        self._api = api
        selector = quote(f"kubernetes.io/service-name={service}")
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{quote(namespace)}/endpointslices?labelSelector={selector}"
        self._ports = {"api": api_port, "admin": admin_port}
        self._slices: dict[str, Json] = {}
        self._version = ""
        self._confirmed_s: float | None = None
        self._is_following = False

    def age_s(self, now_s: float) -> float | None:
        if self._confirmed_s is None:
            return None
        return 0.0 if self._is_following else now_s - self._confirmed_s

    async def run(self, on_endpoints: OnEndpoints) -> None:
        pause_s = FIRST_PAUSE_S
        while True:
            try:
                if not self._version:
                    await self._list()
                    on_endpoints(self._endpoints())
                async for _ in self._watch():
                    on_endpoints(self._endpoints())
                pause_s = FIRST_PAUSE_S
            except ListAgain:
                self._version = ""
            except (UpstreamError, OSError, TimeoutError, msgspec.DecodeError, KeyError, TypeError) as error:
                self._is_following = False
                self._version = ""  # whatever it was, a fresh list is right
                pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
                problem = str(error) or type(error).__name__
                log.warning("discovery: %s; the last %d slices stand", problem, len(self._slices))
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # misses nothing: a watch goes on where one ended

    async def _list(self) -> None:
        body = b"".join([piece async for piece in self._api.get(self._path, ANSWER_TIMEOUT_S)])
        answer = msgspec.json.decode(body)
        self._slices = {item["metadata"]["name"]: item for item in answer["items"]}
        self._version = answer["metadata"]["resourceVersion"]
        self._confirm()

    async def _watch(self) -> AsyncIterator[None]:
        """Takes changes in until the API server ends the watch, one turn for each that concerns pods."""
        target = (
            f"{self._path}&watch=1&allowWatchBookmarks=true&timeoutSeconds={WATCH_S}"
            f"&resourceVersion={quote(self._version)}"
        )
        rest = b""
        async with aclosing(self._api.get(target, WATCH_S + SLACK_S)) as pieces:
            async for piece in pieces:
                *lines, rest = (rest + piece).split(b"\n")
                for line in filter(None, lines):
                    if self._take(msgspec.json.decode(line)):
                        yield
                self._confirm()

    def _take(self, event: Json) -> bool:
        """Whether the slices have changed. Raises ListAgain."""
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            if item.get("code") == GONE:
                raise ListAgain
            raise UpstreamError(f"watch: {item.get('message')}")
        self._version = item["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return False
        name = item["metadata"]["name"]
        if kind == "DELETED":
            self._slices.pop(name, None)
        else:
            self._slices[name] = item
        return True

    def _confirm(self) -> None:
        self._confirmed_s = asyncio.get_running_loop().time()
        self._is_following = True

    def _endpoints(self) -> list[Endpoint]:
        return endpoints_of(self._slices.values(), self._ports)


def endpoints_of(slices: Iterable[Json], default_ports: Mapping[str, int]) -> list[Endpoint]:
    """The pods of EndpointSlices, by name. A pod of two families, or in two slices for a moment, is one pod."""
    found: dict[str, Endpoint] = {}
    for item in sorted(slices, key=lambda item: (item["addressType"], item["metadata"]["name"])):
        named = {port.get("name"): port.get("port") for port in item.get("ports") or ()}
        ports = {name: named.get(name) or default for name, default in default_ports.items()}
        for entry in item.get("endpoints") or ():
            endpoint = _endpoint(entry, ports)
            if endpoint is None:
                continue
            known = found.get(endpoint.uid)
            if known is None or (endpoint.is_ready and not known.is_ready):
                found[endpoint.uid] = endpoint
    return sorted(found.values(), key=lambda endpoint: (endpoint.name, endpoint.uid))


def _endpoint(entry: Json, ports: Mapping[str, int]) -> Endpoint | None:
    """None for what is no pod, or cannot be told from others.

    A Service that publishes unready addresses calls them all ready: `serving` is true.
    """
    target = entry.get("targetRef") or {}
    if target.get("kind") != "Pod" or not all((target.get("name"), target.get("uid"), entry.get("addresses"))):
        return None
    conditions = entry.get("conditions") or {}
    serving = conditions.get("serving")
    is_ready = bool(conditions.get("ready", True) if serving is None else serving)
    is_terminating = bool(conditions.get("terminating"))
    host = entry["addresses"][0]
    return Endpoint(
        name=target["name"],
        uid=target["uid"],
        api=Origin(host, ports["api"]),
        admin=Origin(host, ports["admin"]),
        is_ready=is_ready and not is_terminating,
        is_terminating=is_terminating,
    )
