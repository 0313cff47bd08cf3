"""What running engines say of themselves: `/internal/capacity` of each pod's admin listener."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from prism_operator.pods import Pod

READ_TIMEOUT_S = 2.0
LONGEST_ANSWER_BYTES = 1 << 20
CONCURRENT_READS = 8


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


def admin_token(key: bytes, uid: str) -> str:
    """The bearer token of one PrismDeployment's admin listeners: an HMAC-SHA-256 of its UID, URL-safe base64."""
    digest = hmac.new(key, f"prism-admin-token:{uid}".encode(), hashlib.sha256).digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")


def read_capacities(pods: Sequence[Pod], token: str, port: int) -> list[Capacity]:
    """Of the pods that answer in time; the others are left out."""
    reachable = [pod for pod in pods if pod.ip]
    if not reachable:
        return []
    with ThreadPoolExecutor(min(CONCURRENT_READS, len(reachable))) as pool:
        return [found for found in pool.map(lambda pod: _read(pod, token, port), reachable) if found is not None]


def _read(pod: Pod, token: str, port: int) -> Capacity | None:
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    request = urllib.request.Request(
        f"http://{host}:{port}/internal/capacity", headers={"Authorization": f"Bearer {token}"}
    )
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # pods are never behind a proxy
        with opener.open(request, timeout=READ_TIMEOUT_S) as answer:
            said = json.loads(answer.read(LONGEST_ANSWER_BYTES))
        return Capacity(pod.name, pod.uid, said["total_pages"], said["page_tokens"], said.get("api_keys_problem") or "")
    except (OSError, ValueError, KeyError):  # not up yet, on its way out, of another version: no news
        return None
