"""Every option of `prism-router`. Units are in the names; an unknown key is an error at start-up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, FilePath, model_validator

from prism_server.capacity.units import GIB, MIB
from prism_server.http.sockets import CLIENT_TIMEOUT_S
from prism_server.router.fleet import FleetRules
from prism_server.router.placement import PlacementRules
from prism_server.settings import Group, LogSettings, NonNegative, Port, Positive
from prism_server.settings_cli import SettingsSource

PositiveSeconds = Annotated[float, Field(gt=0)]


class HTTPSettings(Group):
    """The two listeners."""

    host: str = "0.0.0.0"
    port: Port = 8080
    admin_host: str = "0.0.0.0"
    admin_port: Port = 9080
    max_body_bytes: Positive = Field(default=128 * MIB, description="of one request; beyond it: 413")
    max_buffered_bytes: Positive = Field(
        default=1 * GIB, description="bodies held for all requests that have no answer yet; beyond it: 429"
    )
    client_timeout_s: PositiveSeconds = Field(
        default=CLIENT_TIMEOUT_S,
        description="for a client to send more of its request (then: 408), or to take more of its answer",
    )
    page: bool = Field(default=True, description="the page at / to try the model on; off: 404")
    drain_propagation_s: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="after SIGTERM, still open but not ready, until every proxy has noticed"
    )
    drain_timeout_s: Annotated[float, Field(ge=0)] = Field(
        default=60.0, description="after that, for the running streams"
    )
    admin_token_file: FilePath | None = Field(
        default=None, description="token of /internal/*, the pods' and the router's own; absent: none"
    )


class DiscoverySettings(Group):
    """Where the engine pods are: exactly one of backends, dns_name and service."""

    backends: str = Field(default="", description="a list: http://a:8000,http://b:8000|http://b:9001 (api|admin)")
    dns_name: str = Field(default="", description="a name whose addresses are the pods")
    service: str = Field(default="", description="the engines' headless Service in Kubernetes")
    namespace: str = Field(default="", description="of the service; by default the router's own")
    kubernetes_url: str = Field(default="", description="of the API server; by default the cluster's own")
    credentials: Path = Field(
        default=Path("/var/run/secrets/kubernetes.io/serviceaccount"), description="with token, ca.crt and namespace"
    )
    api_port: Port = Field(default=8000, description="of pods, where nothing else says it")
    admin_port: Port = Field(default=9000, description="of pods, where nothing else says it")
    dns_every_s: PositiveSeconds = 2.0
    meeting_s: Annotated[float, Field(ge=0)] = Field(
        default=5.0, description="after the first discovery, for pods to say what they hold, before the router is ready"
    )


class UpstreamSettings(Group):
    """Requests to pods: time-outs, second tries, and pods that keep failing."""

    connect_timeout_s: PositiveSeconds = 2.0
    header_timeout_s: PositiveSeconds = Field(
        default=660.0, description="for the answer's head: a little more than the engines' own deadline"
    )
    idle_timeout_s: PositiveSeconds = Field(default=120.0, description="between two pieces of an answer")
    silence_timeout_s: PositiveSeconds = Field(
        default=20.0, description="a pod that answers neither requests nor polls for so long loses its requests"
    )
    comment_every_s: PositiveSeconds = Field(default=15.0, description="SSE comments while a stream has nothing to say")
    retry_share: Annotated[float, Field(ge=0, le=1)] = Field(
        default=0.2, description="second tries, as a share of all requests"
    )
    retry_burst: NonNegative = Field(default=20, description="second tries at once, before the share counts")
    max_tries: Positive = Field(default=4, description="pods that one request is tried at")
    breaker_failures: Positive = Field(default=3, description="failures in a row after which a pod is left alone")
    breaker_open_s: PositiveSeconds = Field(default=5.0, description="for so long, then one request tries it")


class CacheSettings(Group):
    """Following what the pods' caches hold."""

    poll_ms: Positive = 250
    poll_timeout_s: PositiveSeconds = 5.0


class PlacementSettings(Group):
    """Which pod gets a request."""

    load_bound: Annotated[float, Field(ge=1.0)] = Field(
        default=PlacementRules().load_bound, description="most of the mean load that a pod gets while others have room"
    )
    slow_start_s: Annotated[float, Field(gt=0)] = Field(
        default=FleetRules().slow_start_s, description="until a pod that has become ready gets its whole share"
    )


class RouterSettings(Group):
    """All of `prism-router`."""

    http: HTTPSettings = HTTPSettings()
    discovery: DiscoverySettings = DiscoverySettings()
    upstream: UpstreamSettings = UpstreamSettings()
    cache: CacheSettings = CacheSettings()
    placement: PlacementSettings = PlacementSettings()
    log: LogSettings = LogSettings()

    @model_validator(mode="after")
    def _one_source_of_pods(self) -> RouterSettings:
        found = self.discovery
        if sum(map(bool, (found.backends, found.dns_name, found.service))) != 1:
            raise ValueError("give exactly one of discovery.backends, discovery.dns_name and discovery.service")
        return self


ROUTER = SettingsSource(RouterSettings, {"--backends": "discovery.backends", "--service": "discovery.service"})
