"""httptools' parser for a server that speaks HTTP/1.1 and nothing else: who asks to upgrade is answered as anybody.

httptools takes such a request for one without a body, and what follows, the body, for the next request: Java's client
asks for `h2c` with every first request, and behind a proxy that hands `Upgrade` on, one client's body would be
somebody else's request. A server may ignore the field (RFC 9110, section 7.8).
"""

from __future__ import annotations

from typing import Protocol

import httptools

FRAMING = (b"content-length", b"transfer-encoding")


class Callbacks(Protocol):
    """What is told of requests, as httptools tells it."""

    def on_message_begin(self) -> None: ...

    def on_url(self, url: bytes) -> None: ...

    def on_header(self, name: bytes, value: bytes) -> None: ...

    def on_headers_complete(self) -> None: ...

    def on_body(self, body: bytes) -> None: ...

    def on_message_complete(self) -> None: ...


class RequestParser:
    """In the place of `httptools.HttpRequestParser`. A head that asks to upgrade is read again, as far as it says how
    long the body is, by a parser that then reads the body."""

    def __init__(self, told: Callbacks) -> None:
        self._told = told
        self._framing: list[tuple[bytes, bytes]] = []
        self._is_repeating = False
        self._parser = self._new()

    def feed_data(self, data: bytes) -> None:
        """Raises httptools.HttpParserError."""
        while True:
            try:
                self._parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as asked:
                data = data[asked.args[0] :]
                self._read_head_again()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        return False

    def _new(self) -> httptools.HttpRequestParser:
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn has it
        return parser

    def _read_head_again(self) -> None:
        fields = b"".join(name + b": " + value + b"\r\n" for name, value in self._framing)
        self._parser = self._new()
        self._is_repeating = True
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + fields + b"\r\n")
        self._is_repeating = False

    # httptools' side

    def on_message_begin(self) -> None:
        if not self._is_repeating:
            self._framing = []
            self._told.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._is_repeating:
            self._told.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._is_repeating:
            if name.lower() in FRAMING:
                self._framing.append((name, value))
            self._told.on_header(name, value)

    def on_headers_complete(self) -> None:
        if not self._is_repeating:
            self._told.on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._told.on_body(body)

    def on_message_complete(self) -> None:
        if not self._parser.should_upgrade():  # else the body is still to come
            self._told.on_message_complete()
