"""Fleets, requests and answers for the tests of placement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from prism_server.identity import KEY_VERSION, Digest, MediaOptions, MediaPart, framed_digest, namespace_digest
from prism_server.router.fleet import Fleet, FleetRules, Ticket
from prism_server.router.placement import Decision, decide
from prism_server.router.pods import CacheAnswer, KeyScheme, Pod, PodLoad
from prism_server.router.request_keys import RequestKeys, RequestMedium, chain_of

FP8 = KeyScheme(KEY_VERSION, namespace_digest("model", "", "fp8", "processor"), "layout")
BF16 = KeyScheme(KEY_VERSION, namespace_digest("model", "", "bf16", "processor"), "layout")
FUTURE = KeyScheme(KEY_VERSION + 1, namespace_digest("model", "", "fp8", "processor"), "layout")
PICTURE_TOKENS = 500
IDLE = PodLoad()
LATER_S = 1000.0
"""Long after every slow start."""


def request(*names: Any, schemes: Iterable[KeyScheme] = (FP8,), **fields: Any) -> RequestKeys:
    """A question about pictures; each is known by its name."""
    media = tuple(RequestMedium(feature(name), PICTURE_TOKENS, 4 * PICTURE_TOKENS) for name in names)
    parts = [MediaPart("user", "image", medium.name, MediaOptions()) for medium in media]
    return RequestKeys(
        media=media,
        chains={scheme: chain_of(scheme, parts, None) for scheme in schemes},
        tokens_before=tuple(PICTURE_TOKENS * (i + 1) for i in range(len(media))),
        num_tokens=PICTURE_TOKENS * len(media) + 40,
        **fields,
    )


def feature(name: Any) -> Digest:
    """Content id of the picture of that name."""
    return framed_digest("picture", (str(name),))


def text_request(name: str, num_tokens: int = 1000) -> RequestKeys:
    key = framed_digest("text", (name,))
    return RequestKeys(text_chain=(key,), text_tokens=(num_tokens,), num_tokens=num_tokens + 10)


def fleet(num_pods: int, scheme: KeyScheme = FP8, **rules: Any) -> Fleet:
    """Pods a, b, c, ... that have answered their first poll at time 0 and hold nothing."""
    made = Fleet(FleetRules(**rules))
    made.set_pods(pods(num_pods), 0.0)
    for pod in pods(num_pods):
        made.apply(pod.uid, snapshot(scheme=scheme), 0.0, 0.0)
    return made


def pods(count: int) -> list[Pod]:
    return [Pod(name, f"uid-{name}") for name in "abcdefghijklmnopqrstuvwxyz"[:count]]


def snapshot(
    chains: Sequence[Digest] = (),
    features: Sequence[Digest] = (),
    epoch: str = "first",
    scheme: KeyScheme = FP8,
    cursor: int = 0,
    load: PodLoad = IDLE,
) -> CacheAnswer:
    return CacheAnswer(scheme, epoch, cursor, True, tuple(chains), (), tuple(features), (), load=load)


def news(cursor: int, epoch: str = "first", scheme: KeyScheme = FP8, **changes: Any) -> CacheAnswer:
    """What changed since."""
    return CacheAnswer(scheme, epoch, cursor, False, **changes)


def chosen(of: Fleet, asked: RequestKeys, now_s: float = LATER_S, **options: Any) -> Decision:
    decision = decide(of, asked, now_s, **options)
    assert isinstance(decision, Decision), decision
    return decision


def send(of: Fleet, asked: RequestKeys, now_s: float = LATER_S) -> tuple[Decision, Ticket]:
    """Decided and under way."""
    decision = chosen(of, asked, now_s)
    return decision, of.dispatch(decision, asked, now_s)
