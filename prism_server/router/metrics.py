"""`prism_router_*`: decisions, hits, second tries, and what the router knows. Gauges are read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from prism_server.router.decision import Decision, Reason

PREFIX = "prism_router"
TIMES_S = (0.0005, 0.001, 0.002, 0.004, 0.008, 0.015, 0.03, 0.06, 0.12, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0)


class Metrics:
    """All series of one router."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # CPU seconds, memory, open files
        self._decisions = self._counter("decisions", "tries of requests, by why the pod was chosen", "reason")
        self._answers = self._counter("answers", "answers to clients, by status", "status")
        self._retries = self._counter("retries", "requests tried at another pod, by what the last one did", "cause")
        self._retries_denied = self._counter("retries_denied", "requests given up though a pod was left to try")
        self._suspects = self._counter("suspects", "requests given up because pods had failed at them")
        self._unplaced = self._counter("unplaced", "requests that no pod could take, by why", "reason")
        self._broken = self._counter("broken_streams", "answers that ended in an error after their first byte", "cause")
        self._left = self._counter("client_disconnects", "requests whose client went away")
        self._media = self._counter("media", "media of requests that a pod has answered")
        self._expected_media = self._counter("expected_media_hits", "media whose KV was expected at that pod")
        self._expected_features = self._counter(
            "expected_feature_hits", "further media whose encoder outputs were expected there"
        )
        self._expected_tokens = self._counter("expected_hit_tokens", "prompt tokens expected in that pod's cache")
        self._reused_tokens = self._counter("reused_tokens", "prompt tokens that pods say they found in their cache")
        self._prompt_tokens = self._counter("prompt_tokens", "prompt tokens of the answers that say so")
        self.keys_s = Histogram(
            f"{PREFIX}_keys_seconds", "from the whole body to its keys", buckets=TIMES_S, registry=self.registry
        )
        self.head_s = Histogram(
            f"{PREFIX}_first_byte_seconds",
            "from the whole body to the pod's first byte",
            buckets=TIMES_S,
            registry=self.registry,
        )

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"{PREFIX}_{name}", text, labels, registry=self.registry)

    def expose(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def decided(self, reason: Reason) -> None:
        """For every try."""
        self._decisions.labels(reason.value).inc()

    def placed(self, decision: Decision) -> None:
        """Once for a request: at its first byte, whose pod is where it came to be."""
        self._media.inc(decision.num_media)
        self._expected_media.inc(decision.cached_media)
        self._expected_features.inc(decision.cached_features)
        self._expected_tokens.inc(decision.cached_tokens)

    def reused(self, cached_tokens: int, prompt_tokens: int) -> None:
        """What a pod says it has found."""
        self._reused_tokens.inc(cached_tokens)
        self._prompt_tokens.inc(prompt_tokens)

    def answered(self, status: int) -> None:
        self._answers.labels(str(status)).inc()

    def retried(self, cause: str) -> None:
        self._retries.labels(cause).inc()

    def retry_denied(self) -> None:
        self._retries_denied.inc()

    def suspected(self) -> None:
        self._suspects.inc()

    def unplaced(self, reason: str) -> None:
        self._unplaced.labels(reason).inc()

    def broke(self, cause: str) -> None:
        self._broken.labels(cause).inc()

    def client_left(self) -> None:
        self._left.inc()

    def watch(self, families: Callable[[], Iterable[Metric]]) -> None:
        """From now on a scrape shows these too."""
        self.registry.register(_Reading(families))


class _Reading(Collector):
    """Series that are read at the time of a scrape."""

    def __init__(self, families: Callable[[], Iterable[Metric]]) -> None:
        self._families = families

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield from self._families()


def gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value)


def counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value)


def gauge_by_pod(name: str, text: str, values: Iterable[tuple[str, float]]) -> Metric:
    """One series per pod; of two pods under one name for a moment, the last."""
    family = GaugeMetricFamily(f"{PREFIX}_{name}", text, labels=["pod"])
    for pod, value in dict(values).items():
        family.add_metric([pod], value)
    return family
