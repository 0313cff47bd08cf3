"""For people and the operator: which pods the router knows, and why a request would go where."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import msgspec

from prism_server.http.asgi import Receive, Scope, Send, header
from prism_server.router.asgi import Body, send_json
from prism_server.router.decision import NoPod
from prism_server.router.placement import explain
from prism_server.router.request_keys import RequestKeys
from prism_server.router.services import Services

DEFAULT_PATH = "/v1/chat/completions"
PATH_HEADER = b"x-prism-path"


def pods_known(services: Services) -> dict[str, Any]:
    """Every pod, by what the router goes by; the operator looks here for the UIDs of new ones."""
    now_s = asyncio.get_running_loop().time()
    fleet = services.fleet
    pods = [
        {
            "name": member.endpoint.name,
            "uid": member.endpoint.uid,
            "api": member.endpoint.api.authority.decode(),
            "is_ready": member.endpoint.is_ready,
            "is_terminating": member.endpoint.is_terminating,
            "is_answering": member.is_answering,
            "problem": member.problem,
            "cache_age_s": fleet.answer_age_s(member.endpoint.uid, now_s),
            "in_flight": fleet.in_flight(member.endpoint.uid),
            "is_breaker_open": not member.breaker.is_closed,
        }
        for member in services.members.all()
    ]
    return {
        "phase": services.lifecycle.phase,
        "discovery_age_s": services.discovery.age_s(now_s),
        "pods": pods,
        "stats": asdict(fleet.stats()),
    }


async def explain_placement(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    """The decision for the body sent, with every pod's case. Nothing changes, and no pod hears of it.

    `x-prism-path` says which endpoint the body is for. Raises BadRequest, Overloaded, ClientLeft.
    """
    body = Body(services.buffers)
    try:
        await body.read(scope, receive, services.settings.http.max_body_bytes)
        path = (header(scope, PATH_HEADER) or DEFAULT_PATH.encode()).decode("latin-1")
        keys = await services.keys_of(path, body) if body.data else RequestKeys()
    finally:
        body.release()
    now_s = asyncio.get_running_loop().time()
    blocked = services.members.blocked(now_s)
    decision, candidates = explain(services.fleet, keys, now_s, blocked, services.rules)
    answer = {
        "decision": None if isinstance(decision, NoPod) else asdict(decision),
        "refusal": asdict(decision) if isinstance(decision, NoPod) else None,
        "blocked": sorted(blocked),
        "candidates": [asdict(candidate) for candidate in candidates],
        "request": _request(keys),
    }
    await send_json(send, msgspec.to_builtins(answer))


def _request(keys: RequestKeys) -> dict[str, Any]:
    return {
        "media": [medium.name.hex() for medium in keys.media],
        "num_tokens": keys.num_tokens,
        "answer_tokens": keys.answer_tokens,
        "is_stream": keys.is_stream,
        "text_chain": len(keys.text_chain),
        "schemes": len(keys.chains),
    }
