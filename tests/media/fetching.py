"""Fetchers that may reach the loopback, where a stand-in of the web serves, under names of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from ipaddress import ip_address
from typing import Any

import pytest
from stand_in_web import Site

from prism_server.errors import BadRequest, Overloaded, PrismError
from prism_server.media.addresses import IPAddress
from prism_server.media.fetch import FetchReport, LinkFetcher
from prism_server.media.link import NamedLink
from prism_server.settings import FetchSettings

HOST = "media.example.org"
PARAM = "messages[0].content[0].image_url.url"
BODY = b"any bytes" * 100


class Names:
    """A resolver: each name's answers, the last of which repeats; unknown names are not found."""

    def __init__(self, **names: Sequence[str]) -> None:
        self.asked: list[str] = []
        self._answers = {name.replace("_", "."): list(answers) for name, answers in names.items()}

    async def __call__(self, name: str) -> list[IPAddress]:
        self.asked.append(name)
        answers = self._answers.get(name)
        if not answers:
            raise OSError("no such name")
        return [ip_address(text) for text in (answers.pop(0) if len(answers) > 1 else answers[0]).split()]


class Fetching:
    """A fetcher that may reach the loopback, where the stand-in serves."""

    def __init__(self, web: Site, names: Names | None = None, **settings: Any) -> None:
        self.names = names or Names(media_example_org=["127.0.0.1"])
        self.reports: list[FetchReport] = []
        given = {"hosts": (HOST,), "allow_http": True, "ports": (web.port,), "private_networks": ("127.0.0.0/8",)}
        rules = FetchSettings.model_validate(given | {"total_timeout_s": 60.0} | settings)
        self._port = web.port
        self.fetcher = LinkFetcher(rules, self.reports.append, self.names)

    def url(self, path: str, host: str = HOST, scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self._port}{path}"

    async def get(self, path: str) -> bytes:
        return await self.get_url(self.url(path))

    async def get_url(self, url: str) -> bytes:
        return (await self.fetcher.fetch_all([NamedLink(url, PARAM)]))[url]

    def now(self, path: str) -> bytes:
        return asyncio.run(self.get(path))

    def refusal(self, path: str) -> PrismError:
        return self.refusal_of(self.url(path))

    def refusal_of(self, url: str) -> PrismError:
        with pytest.raises(PrismError) as caught:
            asyncio.run(self.get_url(url))
        error = caught.value
        assert error.status == (429 if isinstance(error, Overloaded) else 400)
        assert "127.0.0.1" not in error.reason
        if isinstance(error, BadRequest):
            assert error.param == PARAM
            assert error.code == f"link_{self.outcomes[-1]}"
        return error

    @property
    def outcomes(self) -> list[str]:
        return [report.outcome for report in self.reports]
