"""The routers' configuration: what the spec says in the words of `prism-router`, as flags of its command line.

Flags, and no ConfigMap: they are few and short, and a pod template that holds them needs nothing that may be gone.
"""

from __future__ import annotations

import json

from prism_operator.children import config, grace, names
from prism_operator.children.overrides import Config, Overrides
from prism_operator.children.resources import router_memory_limit_bytes
from prism_operator.deployment import Deployment
from prism_operator.refused import Refused
from prism_server.router.settings import RouterSettings

HEADER_MARGIN_S = 60
"""An engine ends a request at its own deadline and says so: the router waits a little longer for that."""
BUFFER_PART = 2
"""Of a memory limit, one part in so many may hold bodies."""

SPEC_FIELDS = {
    "http.drain_propagation_s": "drain.propagationSeconds",
    "http.drain_timeout_s": "drain.streamSeconds",
    "upstream.header_timeout_s": "engine.requestTimeoutSeconds",
}
DISCOVERY = ("backends", "dns_name", "service", "namespace", "kubernetes_url", "credentials", "api_port", "admin_port")
FIXED = config.LISTENER_SETTINGS | {f"discovery.{option}" for option in DISCOVERY}
OVERRIDES = Overrides("router.overrides", RouterSettings, SPEC_FIELDS, FIXED)


def router_flags(deployment: Deployment) -> list[str]:
    """Raises Refused (`InvalidSettings`, `InvalidResources`) for what no router would start or work with."""
    spec = deployment.spec
    made = OVERRIDES.merged(_from_spec(deployment), spec.router.overrides)
    if config.is_checked(spec):
        _check_buffer(OVERRIDES.checked(made))
    return [
        f"--{group}.{option}={_spelled(value)}" for group, values in made.items() for option, value in values.items()
    ]


def _from_spec(deployment: Deployment) -> Config:
    spec = deployment.spec
    engine_http = config.engine_config(spec)["http"]
    http = {
        "host": "0.0.0.0",
        "port": names.API_PORT,
        "admin_host": "0.0.0.0",
        "admin_port": names.ADMIN_PORT,
        "admin_token_file": f"{names.ADMIN_TOKEN_DIR}/{names.ADMIN_TOKEN_KEY}",
        "max_body_bytes": engine_http["max_body_bytes"],
        "drain_propagation_s": spec.drain.propagation_seconds,
        # as long as an engine that was told to go at the same time may still send
        "drain_timeout_s": spec.drain.stream_seconds + grace.MARGIN_S,
    }
    if limit_bytes := router_memory_limit_bytes(spec):
        http["max_buffered_bytes"] = limit_bytes // BUFFER_PART
    return {
        "http": http,
        "discovery": {
            "service": names.engine(deployment),
            "api_port": names.API_PORT,
            "admin_port": names.ADMIN_PORT,
        },
        "upstream": {"header_timeout_s": spec.engine.request_timeout_seconds + HEADER_MARGIN_S},
    }


def _check_buffer(settings: RouterSettings) -> None:
    http = settings.http
    if http.max_buffered_bytes < http.max_body_bytes:
        raise Refused(
            "InvalidResources",
            f"router.podTemplate.resources: the memory limit leaves {http.max_buffered_bytes:,} bytes for bodies, and"
            f" one may have {http.max_body_bytes:,} (http.max_body_bytes)",
        )


def _spelled(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
