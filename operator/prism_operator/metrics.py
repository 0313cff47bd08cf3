"""What the operator tells Prometheus about itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector


class _Writes(Collector):
    """A counter whose number is kept elsewhere."""

    def __init__(self) -> None:
        self.count: Callable[[], float] = lambda: 0.0

    def collect(self) -> Iterator[CounterMetricFamily]:
        yield CounterMetricFamily("prism_operator_api_writes_total", "Writing calls to the API server", self.count())


class _Conditions(Collector):
    """What the last resync has read in statuses, so that alerts need no more than this endpoint."""

    def __init__(self) -> None:
        self.bodies: Sequence[Mapping[str, Any]] = ()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "prism_operator_condition",
            "Conditions of PrismDeployments: 1 is True, 0 is False; Unknown ones are left out",
            labels=["deployment_namespace", "deployment", "condition", "reason"],
        )
        for body in self.bodies:
            place = [body["metadata"]["namespace"], body["metadata"]["name"]]
            for condition in body.get("status", {}).get("conditions") or ():
                if condition["status"] != "Unknown":
                    family.add_metric([*place, condition["type"], condition["reason"]], condition["status"] == "True")
        yield family


class Metrics:
    """One set a process, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.passes = Counter(
            "prism_operator_reconciles_total",
            "Passes over PrismDeployments, by result",
            ["result"],
            registry=self.registry,
        )
        self.pass_seconds = Histogram(
            "prism_operator_reconcile_seconds", "Time of a pass over one PrismDeployment", registry=self.registry
        )
        self.watch_events = Counter(
            "prism_operator_watch_events_total", "Events from watches, by kind", ["kind"], registry=self.registry
        )
        self._queue = Gauge("prism_operator_queue_keys", "Deployments that wait for a pass", registry=self.registry)
        self._resync_age = Gauge(
            "prism_operator_resync_age_seconds", "Time since the last resync began", registry=self.registry
        )
        self._writes = _Writes()
        self.registry.register(self._writes)
        self._conditions = _Conditions()
        self.registry.register(self._conditions)
        self._deployments = Gauge(
            "prism_operator_deployments", "PrismDeployments of this operator's class", registry=self.registry
        )

    def observe(
        self, *, queue: Callable[[], float], resync_age_s: Callable[[], float], writes: Callable[[], float]
    ) -> None:
        """Where their values are read when somebody scrapes."""
        self._queue.set_function(queue)
        self._resync_age.set_function(resync_age_s)
        self._writes.count = writes

    def resynced(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        """Takes the PrismDeployments of this operator's class, as a list of all has just found them."""
        self._deployments.set(len(bodies))
        self._conditions.bodies = bodies

    def serve(self, port: int) -> None:
        start_http_server(port, registry=self.registry)
