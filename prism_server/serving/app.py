"""The two ASGI applications, put together."""

from __future__ import annotations

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.routing import Route

from prism_server.errors import BadRequest
from prism_server.http import headers, logs
from prism_server.http.asgi import App, Message, Receive, Scope, Send, header
from prism_server.http.key_file import check_bearer
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

OURS = "/v1/"
"""Under which requests are guarded and logged; elsewhere are probes and the page."""


class Front:
    """Outermost layer of the API: asks for the key before anything is read, gives every answer its request id, and
    logs how it ended."""

    def __init__(self, app: App, services: Services) -> None:
        self._app = app
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope[RAW_SEND] = send
        scope[KEY] = line = RequestLine(scope["method"], scope["path"])
        is_ours = scope["path"].startswith(OURS)
        request_id = headers.request_id_of(header(scope, headers.REQUEST_ID))
        logs.REQUEST_ID.set(request_id.decode())

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                line.status = message["status"]
                message["headers"] = [*message["headers"], (headers.REQUEST_ID, request_id)]
                if self._services.lifecycle.is_going:
                    message["headers"].append(headers.CLOSE)  # the client's next request finds a server that stays
            await send(message)

        answer = self._app
        try:
            if is_ours:
                check_bearer(self._services.api_keys, (header(scope, b"authorization") or b"").decode("latin-1"))
        except BadRequest as error:
            note_refusal(scope, self._services.metrics, error)
            answer = error_response(error)
        try:
            await answer(scope, receive, send_with_id)
        finally:
            if is_ours and self._services.settings.log.requests:
                line.write()


def api_app(services: Services) -> App:
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


def admin_app(services: Services, drain: Callable[[], None]) -> App:
    """What the cluster calls."""
    return _app(services, [*health_routes(services), *admin_routes(services, drain)])


def _app(services: Services, routes: list[Route]) -> Starlette:
    return Starlette(routes=routes, exception_handlers=error_handlers(services.metrics))
