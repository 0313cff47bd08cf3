"""What pods say: engines of themselves (`/internal/capacity`, `/startupz`), routers of engines (`/internal/pods`)."""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from prism_operator.pods import Pod

READ_TIMEOUT_S = 2.0
LONGEST_ANSWER_BYTES = 1 << 20
CONCURRENT_READS = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Capacity:
    """KV pages of one engine, as measured on its card."""

    pod: str
    pod_uid: str
    total_pages: int
    page_tokens: int
    api_keys_problem: str = ""
    """Why the newest file of API keys is not used; the last good keys are."""

    @property
    def total_tokens(self) -> int:
        return self.total_pages * self.page_tokens


@dataclass(frozen=True, slots=True)
class Start:
    """How far one engine's start is. `done` and `total` are bytes of its `stage`, 0 where it has no measure."""

    pod_uid: str
    has_started: bool
    stage: str
    done: int
    total: int


@dataclass(frozen=True, slots=True)
class RouterView:
    """One router's word."""

    router_uid: str
    engine_uids: frozenset[str]
    """Of the engines that it sends requests to: discovered, ready, and answering it."""


def admin_token(key: bytes, uid: str) -> str:
    """The bearer token of one PrismDeployment's admin listeners: an HMAC-SHA-256 of its UID, URL-safe base64."""
    digest = hmac.new(key, f"prism-admin-token:{uid}".encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def read_capacities(pods: Sequence[Pod], token: str, port: int) -> list[Capacity]:
    """Of the pods that answer in time; the others are left out."""

    def read(pod: Pod) -> Capacity:
        said = _get(pod, port, "/internal/capacity", {"Authorization": f"Bearer {token}"})
        return Capacity(pod.name, pod.uid, said["total_pages"], said["page_tokens"], said.get("api_keys_problem") or "")

    return _of_each(pods, read)


def read_starts(pods: Sequence[Pod], port: int) -> list[Start]:
    """Of the pods that answer in time; the others are left out."""

    def read(pod: Pod) -> Start:
        said = _get(pod, port, "/startupz")
        return Start(pod.uid, said["started"], said["stage"], said["done"], said["total"])

    return _of_each(pods, read)


def read_router_views(routers: Sequence[Pod], token: str, port: int) -> list[RouterView]:
    """Of the routers that answer in time; the others are left out."""

    def read(router: Pod) -> RouterView:
        said = _get(router, port, "/internal/pods", {"Authorization": f"Bearer {token}"})
        serving = (pod for pod in said["pods"] if pod["is_ready"] and pod["is_answering"] and not pod["is_terminating"])
        return RouterView(router.uid, frozenset(pod["uid"] for pod in serving))

    return _of_each(routers, read)


def _of_each(pods: Sequence[Pod], read: Callable[[Pod], T]) -> list[T]:
    def answer(pod: Pod) -> T | None:
        try:
            return read(pod)
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
            return None  # not up yet, on its way out, of another version: no news

    reachable = [pod for pod in pods if pod.ip]
    if not reachable:
        return []
    with ThreadPoolExecutor(min(CONCURRENT_READS, len(reachable))) as pool:
        return [found for found in pool.map(answer, reachable) if found is not None]


def _get(pod: Pod, port: int, path: str, headers: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The answer's JSON; a 503 has some, too, while an engine starts. Raises OSError, ValueError."""
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    request = urllib.request.Request(f"http://{host}:{port}{path}", headers=dict(headers or {}))
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # pods are never behind a proxy
    try:
        with opener.open(request, timeout=READ_TIMEOUT_S) as answer:
            content = answer.read(LONGEST_ANSWER_BYTES)
    except urllib.error.HTTPError as refusal:
        if refusal.code != 503:
            raise
        content = refusal.read(LONGEST_ANSWER_BYTES)
    said = json.loads(content)
    if not isinstance(said, dict):
        raise ValueError(f"{path} is no object")
    return said
