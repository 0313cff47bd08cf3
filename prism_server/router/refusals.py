"""A pod's "not me": answers and faults after which another pod may be asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from prism_server.errors import EngineFault, Overloaded, PrismError
from prism_server.http.asgi import Headers
from prism_server.http.error_body import DEFAULT_RETRY_AFTER_S, error_json, retry_after
from prism_server.http.headers import JSON
from prism_server.router.decision import NoPod
from prism_server.router.upstream import ConnectFailed, Connection, Head, UpstreamError

SHUTTING_DOWN = "shutting_down"
OVERLOADED = 429
UNAVAILABLE = 503
ABOUT_THE_REQUEST = frozenset(("deadline_exceeded",))
"""Codes of a 503 that another pod would only repeat, later."""
PASSING = frozenset(("loading", "leaving", "draining", SHUTTING_DOWN))
"""Codes of a pod that is healthy, only not in service."""
SUSPICIOUS = frozenset(("broken", "silent", "died"))
"""Causes that may be the request's doing: the pod had it, and has failed."""
MOST_SUSPICIONS = 2
"""Of one request. A pod that dies is common; two that die of the same request would not be the last."""
DO_NOT_RETRY = (b"x-should-retry", b"false")
"""What OpenAI's clients look at before they send a request again by themselves."""
LONGEST_RETRY_AFTER_S = 60.0


class RouterFault(EngineFault):
    """No pod can answer, or the one that did has broken off. HTTP 503, or an error event."""

    def __init__(self, reason: str, code: str) -> None:
        super().__init__(reason)
        self.code = code


class PodsFailed(EngineFault):
    """Several pods have failed at one request, and no further one is risked. HTTP 502, since nothing says that trying
    again would help."""

    status = 502
    code = "pods_failed"


class Silent(UpstreamError):
    """Nothing has come for too long."""


class ShuttingDown(UpstreamError):
    """The router ends, and its streams with it."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a pod did not take a request."""

    cause: str
    """Label of the metric: connect, broken, silent, died, overloaded, unavailable, shutting_down."""
    reason: str
    """For people."""
    is_fault: bool
    """Of the pod, or of what the request does to it; else the pod is only not in service, or full."""
    head: Head | None = None
    body: bytes = b""
    is_final: bool = False
    """The answer is about the request: nobody else need be asked."""

    @property
    def is_certain(self) -> bool:
        """Whether the fault is the pod's own: nothing of the request has reached it."""
        return self.cause == "connect"

    @property
    def is_suspicious(self) -> bool:
        """Whether the pod may have failed because of the request."""
        return self.cause in SUSPICIOUS

    @property
    def code(self) -> str:
        """Of the error that the client is told, where the pod has not said one."""
        return SHUTTING_DOWN if self.cause == SHUTTING_DOWN else "no_pod"

    @property
    def retry_after_s(self) -> float:
        value = self.head.get(b"retry-after") if self.head else None
        if value is None or not value.isdigit():
            return DEFAULT_RETRY_AFTER_S
        return min(LONGEST_RETRY_AFTER_S, float(value))


async def refusal_of(head: Head, connection: Connection) -> Refusal | None:
    """The refusal that an answer is, with its body read; None if the answer is one. Raises UpstreamError."""
    if head.status == OVERLOADED:
        return Refusal("overloaded", "the pod is overloaded", False, head, await connection.rest())
    if head.status != UNAVAILABLE:
        return None
    body = await connection.rest()
    code = _code(body)
    cause = "died" if code is None else "unavailable"
    is_fault = code not in PASSING | ABOUT_THE_REQUEST
    reason = f"the pod answered 503 {code}" if code else "the pod answered 503"
    return Refusal(cause, reason, is_fault, head, body, code in ABOUT_THE_REQUEST)


def refusal_from(error: UpstreamError) -> Refusal:
    """The same for a pod that did not answer."""
    match error:
        case ShuttingDown():
            return Refusal(SHUTTING_DOWN, str(error), False, is_final=True)
        case ConnectFailed():
            cause = "connect"
        case Silent():
            cause = "silent"
        case _:
            cause = "broken"
    return Refusal(cause, str(error), True)


@dataclass(frozen=True, slots=True)
class LastWord:
    """What the client is told when nobody takes its request."""

    status: int
    body: bytes
    retry_after_s: float | None
    """None: it should not come again by itself."""

    @property
    def headers(self) -> Headers:
        return [JSON, DO_NOT_RETRY if self.retry_after_s is None else retry_after(self.retry_after_s)]


def suspicion(refusal: Refusal) -> LastWord:
    """Where too many pods have failed. `refusal`: the last of them."""
    error = PodsFailed(
        f"{MOST_SUSPICIONS} pods failed at this request, which may be the cause; no other is asked. "
        f"The last: {refusal.reason}"
    )
    return LastWord(error.status, error_json(error), None)


def last_word(refusal: Refusal | None, no_pod: NoPod | None) -> LastWord:
    """The last pod's own refusal where it gave one, else ours. `no_pod`: there is nobody left to ask."""
    if refusal is not None and refusal.head is not None:
        return LastWord(refusal.head.status, refusal.body, refusal.retry_after_s)
    wait_s = no_pod.retry_after_s if no_pod else DEFAULT_RETRY_AFTER_S
    error: PrismError
    if refusal is not None:
        error = RouterFault(f"no pod could take the request; the last: {refusal.reason}", refusal.code)
    elif no_pod is not None and no_pod.reason == "saturated":
        error = Overloaded("all pods are full; try again later")
    else:
        error = RouterFault("no pod is in service", "no_pod")
    return LastWord(error.status, error_json(error), wait_s)


def _code(body: bytes) -> str | None:
    """None: the error has none: the engine has died with the request inside. "": there is no error in it."""
    try:
        code: Any = msgspec.json.decode(body)["error"]["code"]
        return None if code is None else str(code)
    except (msgspec.DecodeError, KeyError, TypeError):  # something in between answered
        return ""
