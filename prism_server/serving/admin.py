"""The second listener: metrics for Prometheus, `/internal/*` for routers and the operator."""

from __future__ import annotations

import re
from collections.abc import Callable
from http import HTTPStatus
from ipaddress import ip_address

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prism_server.engine.messages import EngineStats
from prism_server.errors import BadRequest
from prism_server.http.headers import METRICS_TYPE
from prism_server.http.key_file import check_bearer
from prism_server.identity import KEY_VERSION
from prism_server.serving.http_errors import json_response
from prism_server.serving.services import Services

CURSOR = re.compile(r"[0-9]{1,18}")


def admin_routes(services: Services, drain: Callable[[], None]) -> list[Route]:
    """`drain` starts the same drain as SIGTERM, once, and returns at once."""

    async def metrics(_: Request) -> Response:
        return Response(services.metrics.expose(), media_type=METRICS_TYPE.decode())

    async def capacity(request: Request) -> Response:
        _check_token(services, request)
        return json_response(_identity(services) | _capacity(services))

    async def cache(request: Request) -> Response:
        """What the caches gained and lost since (`epoch`, `cursor`), a snapshot where that says nothing; the load."""
        _check_token(services, request)
        epoch, cursor = request.query_params.get("epoch"), request.query_params.get("cursor")
        if cursor is not None and not CURSOR.fullmatch(cursor):
            raise BadRequest("cursor must be a number that an earlier answer gave", param="cursor")
        news = services.journal.since(epoch, None if cursor is None else int(cursor))
        keys = {
            name: [key.hex() for key in getattr(news, name)]
            for name in ("chains_added", "chains_evicted", "features_added", "features_evicted")
        }
        links = [{"url_digest": link.url_digest.hex(), "content_id": link.content_id.hex()} for link in news.links]
        place = {"epoch": news.epoch, "cursor": news.cursor, "snapshot": news.snapshot}
        return json_response(_identity(services) | place | keys | {"links": links, "load": _capacity(services)})

    async def start_draining(request: Request) -> Response:
        _check_may_change(services, request)
        drain()
        return json_response({"phase": services.lifecycle.phase, "inside": services.lifecycle.inside}, 202)

    async def reset_cache(request: Request) -> Response:
        """Forgets all idle cached KV and features, under a new epoch."""
        _check_may_change(services, request)
        services.running().engine.reset_cache()
        services.journal.reset()
        return json_response({"epoch": services.journal.epoch})

    return [
        Route("/metrics", metrics),
        Route("/internal/capacity", capacity),
        Route("/internal/cache", cache),
        Route("/internal/drain", start_draining, methods=["POST"]),
        Route("/internal/reset_cache", reset_cache, methods=["POST"]),
    ]


def _check_token(services: Services, request: Request) -> None:
    """Raises a 401 where a token is asked for and not given."""
    check_bearer(services.admin_token, request.headers.get("authorization"))


def _check_may_change(services: Services, request: Request) -> None:
    """Without a token nobody on a network may empty or end the server."""
    http = services.settings.http
    if services.admin_token is None and not _is_loopback(http.admin_host):
        reason = (
            f"this needs a token (http.admin_token_file), or http.admin_host on loopback instead of {http.admin_host}"
        )
        raise BadRequest(reason, status=HTTPStatus.FORBIDDEN, code="admin_token_needed")
    _check_token(services, request)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _identity(services: Services) -> dict[str, object]:
    """Which keys this server's caches speak. Raises NotReady while the model is being loaded."""
    info = services.running().engine.info
    return {
        "key_version": KEY_VERSION,
        "namespace": info.namespace,
        "layout": info.layout,
        "page_tokens": info.page_tokens,
    }


def _capacity(services: Services) -> dict[str, object]:
    engine, life, settings = services.running().engine, services.lifecycle, services.settings.engine
    info, stats = engine.info, engine.stats()
    return {
        "epoch": services.journal.epoch,
        "model": info.model_name,
        "revision": info.revision,
        "kv_dtype": info.kv_dtype,
        "bytes_per_token": info.bytes_per_token,
        "max_context_tokens": info.max_context_tokens,
        "total_pages": stats.total_pages,
        "free_pages": stats.free_pages_now,
        "cached_idle_pages": stats.evictable_pages_now,
        "running": stats.running_now,
        "waiting": stats.waiting_now,
        "uncached_tokens": stats.uncached_tokens_now,
        "encoder_queue": stats.encoder_queue_now,
        "inside": life.inside,
        "max_running": settings.max_running_sequences,
        "max_waiting": settings.max_waiting_requests,
        "phase": life.phase,
        "api_keys_problem": services.api_keys.check() if services.api_keys else None,
    } | _costs(stats, info.device)


def _costs(stats: EngineStats, device: str) -> dict[str, float]:
    """What a token and a patch have cost, for a router's estimates. Only of GPUs: a CPU's figures move with all else
    that runs on its machine, and a router would take pods of one kind for fast and slow ones."""
    costs = {"ms_per_token": stats.ms_per_token, "ms_per_patch": stats.ms_per_patch}
    return {name: ms for name, ms in costs.items() if ms is not None and device.startswith("cuda")}
