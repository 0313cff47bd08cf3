"""The two ASGI applications, put together."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prism_server.errors import BadRequest
from prism_server.page import Site
from prism_server.serving.admin import admin_router
from prism_server.serving.auth import check_bearer
from prism_server.serving.exchange import Answering
from prism_server.serving.health import health_router
from prism_server.serving.http_errors import error_response, install_error_handlers, refusal_reason
from prism_server.serving.native_api import generate
from prism_server.serving.openai_api import chat_completions, completions, models_router
from prism_server.serving.services import Services
from prism_server.serving.sse import RAW_SEND

REQUEST_ID = "x-request-id"
MAX_REQUEST_ID_CHARACTERS = 128


class Front:
    """Outermost layer of the API: asks for the key before anything is read, and gives every answer its request id."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[RAW_SEND] = send
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get(REQUEST_ID))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer[REQUEST_ID] = request_id
                if self._services.lifecycle.is_going:
                    answer["connection"] = "close"  # the client's next request finds a server that stays
            await send(message)

        try:
            if scope["path"].startswith("/v1/"):
                check_bearer(self._services.api_keys, headers.get("authorization"))
        except BadRequest as error:
            self._services.metrics.refused(refusal_reason(error))
            await error_response(error)(scope, receive, send_with_id)
            return
        await self._app(scope, receive, send_with_id)


def _request_id(given: str | None) -> str:
    """The client's own where it is harmless to repeat."""
    if given and len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def api_app(services: Services) -> ASGIApp:
    """What users call."""
    app = _bare(services)
    app.include_router(health_router(services))
    app.include_router(models_router(services))
    for path, handler in (
        ("/v1/chat/completions", chat_completions),
        ("/v1/completions", completions),
        ("/v1/generate", generate),
    ):
        app.router.routes.append(Route(path, Answering(services, handler), methods=["POST"]))
    if services.settings.http.page:
        site = Site()
        app.router.routes.extend(Route(path, site, methods=["GET"]) for path in site.paths)
    return Front(app, services)


def admin_app(services: Services, drain: Callable[[], None]) -> ASGIApp:
    """What the cluster calls."""
    app = _bare(services)
    app.include_router(health_router(services))
    app.include_router(admin_router(services, drain))
    return app


def _bare(services: Services) -> FastAPI:
    app = FastAPI(title="Prism", docs_url=None, redoc_url=None, openapi_url=None)
    install_error_handlers(app, services.metrics)
    return app
