"""`/livez`, `/readyz`, `/startupz`, `/version`: open to everybody, never waiting for anything."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from prism_server import __version__
from prism_server.serving.http_errors import json_response
from prism_server.serving.services import Services


def health_routes(services: Services) -> list[Route]:
    life = services.lifecycle

    async def live(_: Request) -> Response:
        """The process runs and its event loop turns: 200 from the first second. A faulted server is not alive."""
        is_alive = life.phase != "faulted"
        return json_response({"alive": is_alive, "reason": "" if is_alive else life.reason}, 200 if is_alive else 503)

    async def ready(_: Request) -> Response:
        """200 exactly while a new request would be let in."""
        is_ready = life.phase == "ready"
        return json_response({"ready": is_ready, "phase": life.phase, "reason": life.reason}, 200 if is_ready else 503)

    async def startup(_: Request) -> Response:
        """200 once the model is loaded; until then 503 with how far it is."""
        has_started = life.ready_after_s is not None
        progress = {
            "started": has_started,
            "stage": life.stage,
            "done": life.stage_done,
            "total": life.stage_total,
            "elapsed_s": round(life.ready_after_s or time.monotonic() - life.started_s, 3),
        }
        return json_response(progress, 200 if has_started else 503)

    async def version(_: Request) -> Response:
        return json_response({"name": "prism", "version": __version__})

    return [
        Route("/livez", live),
        Route("/readyz", ready),
        Route("/startupz", startup),
        Route("/version", version),
    ]
