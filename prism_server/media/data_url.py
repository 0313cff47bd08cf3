"""Data URLs (RFC 2397): the way a request carries the bytes of a medium. Lenient in spelling, strict in size."""

from __future__ import annotations

from urllib.parse import unquote_to_bytes

import pybase64

from prism_server.errors import BadRequest
from prism_server.media.limits import MediaLimits

SCHEME = "data:"
EXAMPLE = "data:image/png;base64,..."
LONGEST_SCHEME = 16

WHITESPACE = b" \t\r\n\v\f"
URL_SAFE_TO_STANDARD = bytes.maketrans(b"-_", b"+/")
"""RFC 4648, section 5: the alphabet for URLs."""


def data_url_bytes(url: str, limits: MediaLimits, param: str) -> bytes:
    """The decoded bytes of a data URL; BadRequest for anything else, and for what is larger than `limits` allow.

    Accepted beside the RFC's own spelling: any case, other parameters, no media type, URL-safe alphabet, missing
    padding, line breaks, percent-encoding. The media type is ignored: the bytes say what they are.
    """
    start = len(url) - len(url.lstrip()) if url[:1].isspace() else 0
    body = start + len(SCHEME)
    if url[start:body].lower() != SCHEME:
        raise BadRequest(_not_a_data_url(url[start:]), param)
    comma = url.find(",", body)
    if comma < 0:
        raise BadRequest(f"a data URL needs a comma before its data: {EXAMPLE}", param)
    parameters = [parameter.strip().lower() for parameter in url[body:comma].split(";")]
    payload = url[comma + 1 :]
    return (_from_base64 if "base64" in parameters[1:] else _from_percent)(payload, limits, param)


def _not_a_data_url(url: str) -> str:
    """Why, in words that name the scheme but do not repeat what may be megabytes."""
    scheme = url[:LONGEST_SCHEME].partition(":")
    if scheme[1] and scheme[0].isascii() and scheme[0].isalnum():
        return f"{scheme[0].lower()} links are not served; send the bytes as a data URL: {EXAMPLE}"
    return f"this is neither a data URL nor a link; send the bytes as a data URL: {EXAMPLE}"


def _from_base64(payload: str, limits: MediaLimits, param: str) -> bytes:
    if len(payload) * 3 // 4 <= limits.max_item_bytes:
        try:  # the usual spelling, in one pass over the text
            return pybase64.b64decode(payload, validate=True)
        except ValueError:
            pass
    plain = _plain_base64(payload)
    limits.check_item_bytes(len(plain) * 3 // 4, param)
    try:
        return pybase64.b64decode(plain + b"=" * (-len(plain) % 4), validate=True)
    except ValueError as error:
        raise BadRequest(f"the data URL is not valid base64: {error}", param) from error


def _plain_base64(payload: str) -> bytes:
    """The payload in the standard alphabet without whitespace and padding. Other characters stay, to be refused."""
    raw = unquote_to_bytes(payload) if "%" in payload else payload.encode("utf-8", "replace")
    return raw.translate(URL_SAFE_TO_STANDARD, WHITESPACE).rstrip(b"=")


def _from_percent(payload: str, limits: MediaLimits, param: str) -> bytes:
    limits.check_item_bytes(len(payload) - 2 * payload.count("%"), param)
    data = unquote_to_bytes(payload.encode("utf-8", "replace"))
    limits.check_item_bytes(len(data), param)
    return data
