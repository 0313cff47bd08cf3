"""The second listener: metrics for Prometheus, `/internal/*` for routers and the operator."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from prism_server.errors import BadRequest
from prism_server.identity import KEY_VERSION
from prism_server.serving.auth import check_bearer
from prism_server.serving.http_errors import json_response
from prism_server.serving.metrics import CONTENT_TYPE
from prism_server.serving.services import Services


def admin_router(services: Services, drain: Callable[[], None]) -> APIRouter:
    """`drain` starts the same drain as SIGTERM, once, and returns at once."""
    router = APIRouter()

    async def token(request: Request) -> None:
        check_bearer(services.admin_token, request.headers.get("authorization"))

    internal = APIRouter(prefix="/internal", dependencies=[Depends(token)])

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(services.metrics.expose(), media_type=CONTENT_TYPE)

    @internal.get("/capacity")
    async def capacity() -> Response:
        return json_response(_identity(services) | _capacity(services))

    @internal.get("/cache")
    async def cache(request: Request) -> Response:
        """What the caches gained and lost since (`epoch`, `cursor`), a snapshot where that says nothing; the load."""
        epoch, cursor = request.query_params.get("epoch"), request.query_params.get("cursor")
        if cursor is not None and not (cursor.isascii() and cursor.isdigit()):
            raise BadRequest("cursor must be a number that an earlier answer gave", param="cursor")
        news = services.journal.since(epoch, None if cursor is None else int(cursor))
        keys = {
            name: [key.hex() for key in getattr(news, name)]
            for name in ("chains_added", "chains_evicted", "features_added", "features_evicted")
        }
        links = [{"url_digest": link.url_digest.hex(), "content_id": link.content_id.hex()} for link in news.links]
        place = {"epoch": news.epoch, "cursor": news.cursor, "snapshot": news.snapshot}
        return json_response(_identity(services) | place | keys | {"links": links, "load": _capacity(services)})

    @internal.post("/drain")
    async def start_draining() -> Response:
        drain()
        return json_response({"phase": services.lifecycle.phase, "inside": services.lifecycle.inside}, 202)

    @internal.post("/reset_cache")
    async def reset_cache() -> Response:
        """Forgets all idle cached KV and features, under a new epoch."""
        services.running().engine.reset_cache()
        services.journal.reset()
        return json_response({"epoch": services.journal.epoch})

    router.include_router(internal)
    return router


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
    }
