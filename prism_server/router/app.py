"""The two ASGI applications: what users call, and what the cluster calls."""

from __future__ import annotations

import logging
import re

from prism_server import __version__
from prism_server.errors import BadRequest, PrismError
from prism_server.http.asgi import App, ClientLeft, Headers, Receive, Scope, Send, header
from prism_server.http.error_body import error_headers, error_json
from prism_server.http.headers import CLOSE, JSON, METRICS_TYPE
from prism_server.http.key_file import check_bearer
from prism_server.page import Site
from prism_server.router.admin import explain_placement, pods_known
from prism_server.router.asgi import send_json, send_whole
from prism_server.router.proxy import BrokenOff, Exchange
from prism_server.router.services import Services

log = logging.getLogger(__name__)

POST_PATHS = frozenset(("/v1/chat/completions", "/v1/completions", "/v1/generate"))
GET_PATH = re.compile(r"/v1/models(/(?!\.)[^/]+)*")
"""No other path reaches a pod, and none that says `..`."""


def api_app(services: Services) -> App:
    """What users call. The page is the router's own copy: it is there before any pod is."""
    site = Site() if services.settings.http.page else None

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if path in POST_PATHS or GET_PATH.fullmatch(path):
            await _proxied(services, scope, receive, send)
        elif site is not None and path in site and method in ("GET", "HEAD"):
            await site(scope, receive, send)
        elif not await _health(services, path, method, send):
            await _refuse(services, send, _unknown(path))

    return app


async def _proxied(services: Services, scope: Scope, receive: Receive, send: Send) -> None:
    exchange = Exchange(services, scope, receive, send)
    with services.lifecycle.request():
        try:
            if scope["method"] == _method_of(scope["path"]):
                await exchange.run()
            else:
                await _refuse_method(services, scope, send)
        except ClientLeft:
            services.metrics.client_left()
        except PrismError as error:
            await _refuse(services, send, error)
        except BrokenOff as fault:
            log.warning("an answer without an end: %s", fault)  # the listener closes the connection
        except Exception as fault:
            log.exception("a fault of the router's own")
            if exchange.status is not None:
                raise
            await _refuse(services, send, PrismError(f"internal error: {type(fault).__name__}"))
            return
    if exchange.status is not None:
        services.metrics.answered(exchange.status)


def _method_of(path: str) -> str:
    return "POST" if path in POST_PATHS else "GET"


async def _refuse_method(services: Services, scope: Scope, send: Send) -> None:
    allowed = _method_of(scope["path"])
    error = BadRequest(f"{scope['path']} takes {allowed}", status=405, code="method_not_allowed")
    await _refuse(services, send, error, [(b"allow", allowed.encode())])


def _unknown(path: str) -> BadRequest:
    return BadRequest(f"there is no {path}", status=404, code="not_found")


async def _refuse(services: Services, send: Send, error: PrismError, headers: Headers = ()) -> None:
    """Before the first byte."""
    services.metrics.answered(error.status)
    close = [CLOSE] if error.status == 413 else []  # the rest of the body is not read
    await send_whole(send, error.status, error_json(error), [JSON, *error_headers(error), *close, *headers])


async def _health(services: Services, path: str, method: str, send: Send) -> bool:
    """Answers `/livez`, `/readyz` and `/version`; whether it was one of them."""
    if method not in ("GET", "HEAD"):
        return False
    phase = services.lifecycle.phase
    if path == "/livez":
        await send_json(send, {"alive": True})
    elif path == "/readyz":
        await send_json(send, {"ready": phase == "ready", "phase": phase}, 200 if phase == "ready" else 503)
    elif path == "/version":
        await send_json(send, {"name": "prism-router", "version": __version__})
    else:
        return False
    return True


def admin_app(services: Services) -> App:
    """What the cluster calls."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        try:
            if path == "/metrics":
                await send_whole(send, 200, services.metrics.expose(), [(b"content-type", METRICS_TYPE)])
            elif path == "/internal/pods":
                check_bearer(services.admin_token, (header(scope, b"authorization") or b"").decode("latin-1"))
                await send_json(send, pods_known(services))
            elif path == "/debug/placement":
                await explain_placement(services, scope, receive, send)
            elif not await _health(services, path, method, send):
                raise _unknown(path)
        except PrismError as error:
            await _refuse(services, send, error)
        except ClientLeft:
            return

    return app
