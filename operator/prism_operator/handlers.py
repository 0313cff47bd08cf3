"""kopf watches, nothing more: an event puts a key on the queue. No handler that wants finalizers or annotations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import kopf

from prism_operator.api import CHILD_KINDS, POD, PRISM_DEPLOYMENT, Api, Kind
from prism_operator.children import names
from prism_operator.crd.base import GROUP
from prism_operator.crd.base import KIND as OWNER_KIND
from prism_operator.deployment import LABEL_CLASS, LABEL_DEPLOYMENT, class_of
from prism_operator.health import Health
from prism_operator.metrics import Metrics
from prism_operator.observe import identity
from prism_operator.options import OperatorOptions
from prism_operator.queue import Key, KeyQueue

CONNECT_TIMEOUT_S = 10.0
WATCH_SERVER_TIMEOUT_S = 240
"""The API server ends a watch after this; the client gives it some seconds more and then counts it as broken."""
WATCH_CLIENT_TIMEOUT_S = 270.0
INACTIVITY_S = 90.0
"""The API server sends a bookmark every minute: a watch that is silent for longer is dead."""
BURST_S = 0.05
"""Events of one change come together: one pass for all of them."""

Body = Mapping[str, Any]


class Watches:
    """Translates events into keys. `queue` belongs to the loop that kopf runs on."""

    def __init__(self, options: OperatorOptions, queue: KeyQueue, health: Health, metrics: Metrics) -> None:
        self._class = options.operator_class
        self._queue = queue
        self._health = health
        self._metrics = metrics
        self._by_stem: dict[tuple[str, str], Key] = {}

    def deployment_event(self, kind: str | None, body: Body) -> None:
        """Of a PrismDeployment; `kind` is the event's type, None for the first list."""
        metadata = body["metadata"]
        key = Key(metadata["namespace"], metadata["name"])
        stem = (key.namespace, names.stem(identity(body)))
        self._health.watched(key, None if kind == "DELETED" else metadata["resourceVersion"])
        self._metrics.watch_events.labels(OWNER_KIND).inc()
        if class_of(body) != self._class:
            return
        if kind == "DELETED":
            self._by_stem.pop(stem, None)
        else:
            self._by_stem[stem] = key
        self._queue.add(key, BURST_S)

    def child_event(self, kind: str, body: Body) -> None:
        """Of an object with our labels; pods know only their deployment's stem."""
        metadata = body["metadata"]
        self._metrics.watch_events.labels(kind).inc()
        key = self._owner(metadata) or self._by_stem.get(
            (metadata["namespace"], (metadata.get("labels") or {}).get(LABEL_DEPLOYMENT, ""))
        )
        if key is not None:
            self._queue.add(key, BURST_S)

    @staticmethod
    def _owner(metadata: Body) -> Key | None:
        for owner in metadata.get("ownerReferences") or ():
            if owner["kind"] == OWNER_KIND and owner["apiVersion"].startswith(f"{GROUP}/"):
                return Key(metadata["namespace"], owner["name"])
        return None


def registry_of(api: Api, watches: Watches, missing: frozenset[str]) -> kopf.OperatorRegistry:
    """Handlers for the resource and for every kind that it owns; `missing` kinds are not served by this cluster."""
    registry = kopf.OperatorRegistry()

    @kopf.on.login(registry=registry)
    def _login(**_: Any) -> kopf.ConnectionInfo:
        return kopf.ConnectionInfo(**api.credentials())

    @kopf.on.event(*_where(PRISM_DEPLOYMENT), registry=registry)
    async def _deployment(type: str | None, body: Body, **_: Any) -> None:
        watches.deployment_event(type, body)

    for kind in (*CHILD_KINDS, POD):
        if kind.kind not in missing:
            _watch_child(kind, watches, registry)
    return registry


def _watch_child(kind: Kind, watches: Watches, registry: kopf.OperatorRegistry) -> None:
    @kopf.on.event(*_where(kind), id=f"watch-{kind.plural}", registry=registry)
    async def _child(body: Body, **_: Any) -> None:
        watches.child_event(kind.kind, body)


def _where(kind: Kind) -> tuple[str, str, str]:
    group, _, version = kind.api_version.rpartition("/")
    return group, version, kind.plural


def settings_of(options: OperatorOptions) -> kopf.OperatorSettings:
    """kopf with everything off but the watches."""
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.peering.standalone = True
    settings.scanning.disabled = True  # kinds and namespaces are known: no right to list CRDs or namespaces is needed
    settings.watching.server_timeout = WATCH_SERVER_TIMEOUT_S
    settings.watching.client_timeout = WATCH_CLIENT_TIMEOUT_S
    settings.watching.connect_timeout = CONNECT_TIMEOUT_S
    settings.watching.inactivity_timeout = INACTIVITY_S
    settings.networking.request_timeout = 30.0
    settings.networking.connect_timeout = CONNECT_TIMEOUT_S
    for kind in (*CHILD_KINDS, POD):
        group, version, plural = _where(kind)
        selector = f"{LABEL_DEPLOYMENT},{LABEL_CLASS}={options.operator_class}"
        settings.watching.label_selectors[group, version, plural] = selector
    return settings


async def watch(api: Api, options: OperatorOptions, watches: Watches, missing: frozenset[str]) -> None:
    """Runs kopf until SIGTERM or SIGINT. Raises what a watch has failed of for good."""
    await kopf.operator(
        registry=registry_of(api, watches, missing),
        settings=settings_of(options),
        clusterwide=not options.namespace,
        namespaces=[options.namespace] if options.namespace else [],
        standalone=True,
    )
