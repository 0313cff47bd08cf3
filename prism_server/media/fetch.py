"""Media by link: fetched on the event loop, under rules that hold for every hop, once for all who ask.

What is cached here are bytes by link. Nothing else is ever chosen by a link: facts, patches, features and KV go by the
content of the bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import httpcore

from prism_server.errors import BadRequest
from prism_server.media.addresses import IPAddress, may_fetch_from
from prism_server.media.link import DEFAULT_PORTS, Failure, Link, LinkError, NamedLink, is_listed, parse_link
from prism_server.media.link_cache import Body, Kept, LinkCache, LinkCacheStats
from prism_server.media.link_headers import AnswerHeaders
from prism_server.media.pinned_http import Resolve, get, system_resolver, tls_context
from prism_server.settings import FetchSettings

REDIRECTS = (301, 302, 303, 307, 308)

Outcome = Failure | Literal["fetched", "unchanged", "fresh"]
"""`unchanged`: the host said that what is kept still holds (304); `fresh`: nobody had to be asked."""


@dataclass(frozen=True, slots=True)
class FetchReport:
    """How one fetch ended."""

    outcome: Outcome
    num_bytes: int = 0
    """That came over the network."""
    time_s: float | None = None
    """None: nobody was asked."""


@dataclass(frozen=True, slots=True)
class _Arrived:
    outcome: Outcome
    body: Body
    num_bytes: int


@dataclass(slots=True)
class _Flight:
    task: asyncio.Task[Body]
    waiters: int = 0


class LinkFetcher:
    """Fetches what links lead to. Event loop only; blocks nothing and holds no thread that decodes.

    `resolve`: by default the system's; `on_fetch` is told of every fetch, not of those who joined one.
    """

    def __init__(
        self,
        settings: FetchSettings,
        on_fetch: Callable[[FetchReport], None] = lambda report: None,
        resolve: Resolve | None = None,
    ) -> None:
        self._settings = settings
        self._on_fetch = on_fetch
        self._threads = ThreadPoolExecutor(settings.concurrency, thread_name_prefix="prism-fetch")
        self._resolve = resolve or system_resolver(self._threads)
        self._tls = tls_context(settings.ca_file)
        self._places = asyncio.Semaphore(settings.concurrency)
        self._cache = LinkCache(settings.cache_bytes)
        self._flights: dict[Link, _Flight] = {}

    async def fetch_all(self, named: Sequence[NamedLink]) -> dict[str, bytes]:
        """The bytes behind the links of one request, by `NamedLink.url`.

        All links are checked before one is asked for. The first that fails fails all: BadRequest with its param, or
        Overloaded.
        """
        links = {link.url: (self._checked(link), link.param) for link in named}
        if len(links) > self._settings.max_request_links:
            reason = (
                f"the request names {len(links)} links; this server fetches {self._settings.max_request_links} for one"
            )
            raise BadRequest(reason, named[-1].param, code="link_refused")
        num_bytes = 0

        async def fetched(link: Link, param: str) -> bytes:
            nonlocal num_bytes
            try:
                data = (await self._shared(link)).data
            except LinkError as error:
                raise error.of_request(param) from error
            num_bytes += len(data)
            most = self._settings.max_request_bytes
            if num_bytes > most:
                raise BadRequest(f"the links of the request have more than {most} bytes", param, code="link_too_large")
            return data

        try:
            async with asyncio.TaskGroup() as group:
                tasks = {url: group.create_task(fetched(link, param)) for url, (link, param) in links.items()}
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return {url: task.result() for url, task in tasks.items()}

    def stats(self) -> LinkCacheStats:
        return self._cache.stats()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- rules

    def _checked(self, named: NamedLink) -> Link:
        try:
            link = parse_link(named.url)
            self._check(link)
        except LinkError as error:
            self._on_fetch(FetchReport(error.failure))
            raise error.of_request(named.param) from error
        return link

    def _check(self, link: Link) -> None:
        """Everything that can be said before a name is looked up."""
        rules = self._settings
        if link.scheme == "http" and not rules.allow_http:
            raise LinkError("refused", "is not https, and this server fetches from nothing else")
        if not is_listed(link.host, rules.hosts):
            raise LinkError("refused", "has a host that this server does not fetch from")
        if link.port != DEFAULT_PORTS[link.scheme] if not rules.ports else link.port not in rules.ports:
            raise LinkError("refused", "has a port that this server does not fetch from")

    async def _addresses(self, link: Link) -> Sequence[IPAddress]:
        """Looked up once, checked, and then connected to as they are. One that is not allowed spoils all."""
        try:
            found = [link.address] if link.address else await self._resolve(link.host)
        except OSError as error:
            raise LinkError("unreachable", "has a host that cannot be found") from error
        if not found or not all(may_fetch_from(address, self._settings.private_networks) for address in found):
            raise LinkError("refused", "leads to an address that this server does not fetch from")
        return found

    # --- one fetch for all who ask

    async def _shared(self, link: Link) -> Body:
        kept = self._cache.get(link.text)
        if kept is not None and time.monotonic() < kept.fresh_until_s:
            self._on_fetch(FetchReport("fresh"))
            return kept.body
        flight = self._flights.get(link)
        if flight is None:
            flight = self._flights[link] = _Flight(asyncio.create_task(self._reported(link)))
        flight.waiters += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.waiters -= 1
            if not flight.waiters:  # it has ended, or nobody wants it any more
                flight.task.cancel()
                if self._flights.get(link) is flight:
                    del self._flights[link]

    async def _reported(self, link: Link) -> Body:
        started_s = time.monotonic()
        try:
            await self._take_place()
            try:
                started_s = time.monotonic()
                arrived = await self._in_time(link)
            finally:
                self._places.release()
        except LinkError as error:
            self._on_fetch(FetchReport(error.failure, 0, time.monotonic() - started_s))
            raise
        self._on_fetch(FetchReport(arrived.outcome, arrived.num_bytes, time.monotonic() - started_s))
        return arrived.body

    async def _take_place(self) -> None:
        try:
            async with asyncio.timeout(self._settings.total_timeout_s):
                await self._places.acquire()
        except TimeoutError:
            raise LinkError("busy", "has to wait for too many others") from None

    async def _in_time(self, link: Link) -> _Arrived:
        timeout_s = self._settings.total_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                return await self._walk(link)
        except TimeoutError:
            raise LinkError("timeout", f"leads to something that was not there within {timeout_s:g} s") from None

    # --- one fetch

    async def _walk(self, link: Link) -> _Arrived:
        """From hop to hop, each under all rules, to the bytes or to the word that they are still the same."""
        rules, kept, here = self._settings, self._cache.get(link.text), link
        for num_redirects in range(rules.max_redirects + 1):
            asked = kept if kept is not None and kept.source == here.text else None
            addresses = await self._addresses(here)
            async with get(here, addresses, _conditions(asked), self._tls, rules.connect_timeout_s) as response:
                said = AnswerHeaders(response.headers)
                if response.status in REDIRECTS:
                    here = self._next(here, said)
                    continue
                if response.status == 304 and asked is not None:
                    arrived = _Arrived("unchanged", asked.body, 0)
                elif response.status == 200:
                    body = await self._read(response, said)
                    arrived = _Arrived("fetched", body, len(body.data))
                else:
                    raise LinkError("status", f"leads to an answer with status {response.status}")
            fresh_s = min(said.fresh_s, rules.max_fresh_s) if num_redirects == 0 else 0  # redirects may change
            self._keep(link, here, said, arrived.body, fresh_s, asked)
            return arrived
        raise LinkError("refused", f"leads through more than {rules.max_redirects} redirects")

    def _next(self, here: Link, said: AnswerHeaders) -> Link:
        if said.location is None:
            raise LinkError("broken", "leads to a redirect that leads nowhere")
        try:
            link = here.redirected(said.location)
            self._check(link)
        except LinkError as error:
            raise LinkError(error.failure, f"leads on to another, and that one {error.reason}") from error
        return link

    async def _read(self, response: httpcore.Response, said: AnswerHeaders) -> Body:
        most = self._settings.max_bytes
        too_large = LinkError("too_large", f"leads to more than {most} bytes, the most that this server fetches")
        if not said.is_plain:
            raise LinkError("broken", "leads to a compressed answer, which nobody asked for")
        if said.content_length > most:
            raise too_large
        data = bytearray()
        async for chunk in response.aiter_stream():
            if len(data) + len(chunk) > most:
                raise too_large
            data += chunk
            await asyncio.sleep(0)  # many small chunks come at once: they must not hold up the loop
        return await asyncio.get_running_loop().run_in_executor(self._threads, _body, data)

    def _keep(
        self, link: Link, source: Link, said: AnswerHeaders, body: Body, fresh_s: int, asked: Kept | None
    ) -> None:
        """`asked`: what the answer has confirmed, if it has; its validators hold where the answer names none."""
        etag, last_modified = said.validator("etag"), said.validator("last-modified")
        if asked is not None and asked.body is body:
            etag, last_modified = etag or asked.etag, last_modified or asked.last_modified
        if said.may_be_kept and (etag or last_modified or fresh_s):
            kept = Kept(body, source.text, etag, last_modified, time.monotonic() + fresh_s)
            self._cache.put(link.text, kept)
        else:
            self._cache.drop(link.text)


def _conditions(asked: Kept | None) -> dict[str, bytes]:
    """Headers that spare the answer if it would be the one that is known."""
    pairs = () if asked is None else (("If-None-Match", asked.etag), ("If-Modified-Since", asked.last_modified))
    return {name: value for name, value in pairs if value is not None}


def _body(data: bytearray) -> Body:
    """Copying and hashing tens of megabytes: for a thread."""
    whole = bytes(data)
    return Body(whole, hashlib.sha256(whole).digest())
