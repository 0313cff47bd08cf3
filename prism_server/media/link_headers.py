"""What the headers of an answer say about keeping it (RFC 9111, RFC 9110), as far as it is heeded here."""

from __future__ import annotations

from collections.abc import Iterable

MAX_VALIDATOR_BYTES = 1024
"""Longer ones are not remembered: a host must not fill the cache with them."""
MAX_DIGITS = 18
"""Of a number; what has more is as large as can be."""


class AnswerHeaders:
    """Headers by their names in lower case; of one that comes several times the values are joined."""

    def __init__(self, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self._values: dict[str, bytes] = {}
        for raw_name, value in headers:
            name = raw_name.decode("latin-1").lower()
            self._values[name] = self._values[name] + b", " + value if name in self._values else value
        directives = (part.strip().lower().partition("=") for part in self._text("cache-control").split(","))
        self._cache_control = {name.strip(): value.strip(' "') for name, _, value in directives}

    def validator(self, name: str) -> bytes | None:
        """`etag` or `last-modified`."""
        value = self._values.get(name)
        return value if value and len(value) <= MAX_VALIDATOR_BYTES else None

    @property
    def location(self) -> str | None:
        """Of a redirect; None for one that leads nowhere."""
        try:
            return self._values["location"].decode()
        except (KeyError, UnicodeDecodeError):
            return None

    @property
    def content_length(self) -> int:
        """As declared; 0 if it is not."""
        return _number(self._text("content-length")) or 0

    @property
    def is_plain(self) -> bool:
        """Whether the body is the bytes themselves and not packed."""
        return self._text("content-encoding").strip().lower() in ("", "identity")

    @property
    def may_be_kept(self) -> bool:
        """This server answers many users: `private` answers are not for sharing."""
        return not self._cache_control.keys() & {"no-store", "private"}

    @property
    def fresh_s(self) -> int:
        """Seconds that nobody needs to ask again: `max-age` less `Age`. Nothing is guessed where it is missing."""
        max_age, age = _number(self._cache_control.get("max-age", "")), _number(self._text("age"))
        if "no-cache" in self._cache_control or max_age is None:
            return 0
        return max(0, max_age - (age or 0))

    def _text(self, name: str) -> str:
        return self._values.get(name, b"").decode("latin-1")


def _number(text: str) -> int | None:
    """None for what is no number of digits alone."""
    if not text.isdecimal():
        return None
    return int(text) if len(text) <= MAX_DIGITS else 10**MAX_DIGITS
