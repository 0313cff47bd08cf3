"""Which headers go through a proxy, and the ones that the router adds."""

from __future__ import annotations

from collections.abc import Iterator

from prism_server.http.asgi import Headers
from prism_server.http.headers import REQUEST_ID, ROUTER
from prism_server.router.decision import Decision
from prism_server.router.upstream import Head

POD = b"x-prism-pod"
CACHE = b"x-prism-cache"
CACHED_TOKENS = b"x-prism-cached-tokens"
PROMPT_TOKENS = b"x-prism-prompt-tokens"

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
"""RFC 9110, section 7.6.1, and those that proxies are known to add."""
NOT_FORWARDED = HOP_BY_HOP | {b"host", b"content-length", b"expect", REQUEST_ID, ROUTER}
"""The body is forwarded in one piece with a length of its own, and has been read: nobody waits to be asked for it."""
NOT_ANSWERED = HOP_BY_HOP | {REQUEST_ID, POD, CACHE, b"date"}


def named_hops(headers: Headers) -> set[bytes]:
    """Headers that `connection` declares to be between two neighbours only."""
    values = [value for name, value in headers if name == b"connection"]
    return {name.strip().lower() for value in values for name in value.split(b",")}


def request_headers(headers: list[tuple[bytes, bytes]], request_id: bytes) -> list[tuple[bytes, bytes]]:
    """What the pod is told: everything but what concerns the client's connection."""
    dropped = NOT_FORWARDED | named_hops(headers)
    passed = ((name, value) for name, value in headers if name not in dropped)
    return [*passed, (REQUEST_ID, request_id), (ROUTER, b"1")]


def answer_headers(head: Head) -> Iterator[tuple[bytes, bytes]]:
    """What the client is told of a pod's answer."""
    dropped = NOT_ANSWERED | named_hops(head.headers)
    return ((name, value) for name, value in head.headers if name not in dropped)


def reused_tokens(head: Head) -> tuple[int, int] | None:
    """(tokens found in the cache, tokens of the prompt) as the pod says them; None if it does not."""
    cached, prompt = head.get(CACHED_TOKENS), head.get(PROMPT_TOKENS)
    if cached is None or prompt is None or not (cached.isdigit() and prompt.isdigit()):
        return None
    return int(cached), int(prompt)


def placement_headers(decision: Decision, head: Head) -> list[tuple[bytes, bytes]]:
    """`x-prism-pod`, and `x-prism-cache`: why there, what was expected to be found, and what was."""
    said = (
        f"{decision.reason}; media={decision.cached_media}/{decision.num_media}"
        f"; features={decision.cached_features}; expected_tokens={decision.cached_tokens}"
    )
    reused = reused_tokens(head)
    if reused is not None:
        said += f"; reused_tokens={reused[0]}"
    return [(POD, decision.name.encode()), (CACHE, said.encode())]
