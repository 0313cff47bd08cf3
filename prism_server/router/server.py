"""The whole router, from the first socket to the last stream: listen, discover, serve, drain."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from prism_server.errors import StartupError
from prism_server.http.listener import Listener
from prism_server.http.sockets import MAX_HEAD_BYTES, bind, url_of
from prism_server.http.stop import LAST_WORDS_S, StopSignal, until_empty, wait_for
from prism_server.router.app import admin_app, api_app
from prism_server.router.discovery_kubernetes import KubernetesApi, KubernetesDiscovery
from prism_server.router.discovery_static import DnsDiscovery, StaticDiscovery, parse_backends
from prism_server.router.endpoints import Discovery
from prism_server.router.gauges import read_gauges
from prism_server.router.services import Services
from prism_server.router.settings import DiscoverySettings, RouterSettings

MAX_CLIENT_HEAD_BYTES = MAX_HEAD_BYTES // 2
"""Less than pods take, with what is added here: else a client's head could make pods hang up, and look faulty."""


def discovery_of(settings: DiscoverySettings, environ: Mapping[str, str] = os.environ) -> Discovery:
    """The source of pods that the settings name. Raises StartupError."""
    if settings.backends:
        return StaticDiscovery(parse_backends(settings.backends, settings.admin_port))
    if settings.dns_name:
        return DnsDiscovery(settings.dns_name, settings.api_port, settings.admin_port, settings.dns_every_s)
    url, namespace = settings.kubernetes_url, settings.namespace
    if not url:
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise StartupError("discovery.service needs a cluster, or discovery.kubernetes_url")
        url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
    if not namespace:
        try:
            namespace = (settings.credentials / "namespace").read_text("utf-8").strip()
        except OSError as error:
            raise StartupError(f"discovery.namespace is not given, and cannot be read: {error}") from error
    api = KubernetesApi(url, settings.credentials)
    return KubernetesDiscovery(api, namespace, settings.service, settings.api_port, settings.admin_port)


async def serve(settings: RouterSettings) -> int:
    """Runs until told to stop; the process's exit code. Raises StartupError if it cannot start as configured."""
    services = Services(settings, discovery_of(settings.discovery))
    services.metrics.watch(lambda: read_gauges(services))
    stop = StopSignal()
    http = settings.http
    bound = bind(http.host, http.port, "http.port"), bind(http.admin_host, http.admin_port, "http.admin_port")
    longest_close_s = http.drain_timeout_s + LAST_WORDS_S
    api = Listener(bound[0], api_app(services), longest_close_s, http.client_timeout_s, MAX_CLIENT_HEAD_BYTES)
    admin = Listener(bound[1], admin_app(services), 1.0, http.client_timeout_s)
    for listener in (api, admin):
        listener.start()
    print(f"prism-router: api on {url_of(bound[0])}, admin on {url_of(bound[1])}", flush=True)
    background = [asyncio.create_task(task) for task in (services.discover(), services.tick())]
    asked = asyncio.create_task(stop.asked.wait())
    try:
        await asyncio.wait([asked, *background], return_when=asyncio.FIRST_COMPLETED)
        for ended in filter(asyncio.Task.done, background):
            ended.result()  # neither ends but by a fault of ours, which ends the process
        await _drain(services, stop, api)
    finally:
        for task in (asked, *background):
            task.cancel()
        await asyncio.gather(api.close(), admin.close(), *background, return_exceptions=True)
        services.close()
    return 0


async def _drain(services: Services, stop: StopSignal, api: Listener) -> None:
    """First not ready, but open, until every proxy has noticed; then nobody new, and the streams may finish."""
    life = services.lifecycle
    life.leave()
    await wait_for(stop.hurry, services.settings.http.drain_propagation_s)
    life.drain()
    api.shut()
    await until_empty(lambda: life.inside, services.settings.http.drain_timeout_s, stop.hurry)
    for request in tuple(services.open):
        request.stop()
    await until_empty(lambda: life.inside, LAST_WORDS_S)
