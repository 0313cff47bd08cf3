"""What the operator tells Prometheus about itself."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.process_collector import ProcessCollector


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
        self._writes = Gauge("prism_operator_api_writes", "Writing calls to the API server", registry=self.registry)
        self.deployments = Gauge(
            "prism_operator_deployments", "PrismDeployments of this operator's class", registry=self.registry
        )

    def observe(
        self, *, queue: Callable[[], float], resync_age_s: Callable[[], float], writes: Callable[[], float]
    ) -> None:
        """Where the gauges read their values when they are asked for."""
        self._queue.set_function(queue)
        self._resync_age.set_function(resync_age_s)
        self._writes.set_function(writes)

    def serve(self, port: int) -> None:
        start_http_server(port, registry=self.registry)
