"""The two ASGI applications, put together."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prism_server.errors import BadRequest
from prism_server.http_listener.key_file import check_bearer
from prism_server.http_listener.logs import REQUEST_ID
from prism_server.page import Site
from prism_server.serving.admin import admin_routes
from prism_server.serving.exchange import Answering
from prism_server.serving.health import health_routes
from prism_server.serving.http_errors import error_handlers, error_response, note_refusal
from prism_server.serving.native_api import generate
from prism_server.serving.openai_api import chat_completions, completions, model_routes
from prism_server.serving.request_log import KEY, RequestLine
from prism_server.serving.services import Services
from prism_server.serving.sse import RAW_SEND

REQUEST_ID_HEADER = "x-request-id"
OURS = "/v1/"
"""Under which requests are guarded and logged; elsewhere are probes and the page."""
MAX_REQUEST_ID_CHARACTERS = 128


class Front:
    """Outermost layer of the API: asks for the key before anything is read, gives every answer its request id, and
    logs how it ended."""

    def __init__(self, app: ASGIApp, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[RAW_SEND] = send
        scope[KEY] = line = RequestLine(scope["method"], scope["path"])
        is_ours = scope["path"].startswith(OURS)
        headers = Headers(scope=scope)
        request_id = _request_id(headers.get(REQUEST_ID_HEADER))
        REQUEST_ID.set(request_id)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
                answer = MutableHeaders(scope=message)
                answer[REQUEST_ID_HEADER] = request_id
                if self._services.lifecycle.is_going:
                    answer["connection"] = "close"  # the client's next request finds a server that stays
            await send(message)

        answer = self._app
        try:
            if is_ours:
                check_bearer(self._services.api_keys, headers.get("authorization"))
        except BadRequest as error:
            note_refusal(scope, self._services.metrics, error)
            answer = error_response(error)
        try:
            await answer(scope, receive, send_with_id)
        finally:
            if is_ours and self._services.settings.log.requests:
                line.write()


def _request_id(given: str | None) -> str:
    """The client's own where it is harmless to repeat."""
    if given and len(given) <= MAX_REQUEST_ID_CHARACTERS and given.isascii() and given.isprintable():
        return given
    return uuid.uuid4().hex


def api_app(services: Services) -> ASGIApp:
    """What users call."""
    routes = [*health_routes(services), *model_routes(services)]
    for path, handler in (
        ("/v1/chat/completions", chat_completions),
        ("/v1/completions", completions),
        ("/v1/generate", generate),
    ):
        routes.append(Route(path, Answering(services, handler), methods=["POST"]))
    if services.settings.http.page:
        site = Site()
        routes += [Route(path, site, methods=["GET"]) for path in site.paths]
    return Front(_app(services, routes), services)


def admin_app(services: Services, drain: Callable[[], None]) -> ASGIApp:
    """What the cluster calls."""
    return _app(services, [*health_routes(services), *admin_routes(services, drain)])


def _app(services: Services, routes: list[Route]) -> Starlette:
    return Starlette(routes=routes, exception_handlers=error_handlers(services.metrics))
