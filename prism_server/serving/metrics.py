"""`prism_*`: what requests cost and how long they took. Times in seconds, as Prometheus wants them. And `process_*`.

Counters and histograms are fed on the event loop from the events of requests. Gauges are read from the engine's last
snapshot when somebody scrapes.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from prism_server.engine.messages import Event, GenerateRequest, RequestFinished, SampleFinished, TokenDelta
from prism_server.media.fetch import FetchReport, LinkFetcher

if TYPE_CHECKING:
    from prism_server.engine.engine import Engine  # imports torch, long after the ports must answer

MAX_UNKNOWN_FIELDS = 64
"""Names of unknown request fields that get a series of their own; the later ones are counted as `other`."""
FIELD_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,39}$")

ENGINE_COUNTERS = {
    "preemptions": "requests put back because pages were short",
    "parked": "times that a request waited for a prefix that another was computing",
    "encoded_media_tokens": "tokens made by the vision tower",
    "swapped_in_pages": "pages brought back from the host",
    "swapped_out_pages": "pages moved to the host",
    "eager_steps": "engine steps whose language rows ran outside a captured graph",
    "evicted_pages": "pages of cached prefixes that were given to something else",
    "feature_evictions": "encoder outputs dropped for others",
    "text_memo_hits": "texts whose tokens were remembered",
    "text_memo_misses": "texts that had to be tokenised",
    "text_memo_evictions": "texts whose tokens were forgotten for others",
}
"""Counters of the engine with names of their own, there from the start. The others are `prism_engine_*`."""

TOKEN_TIMES_S = (0.002, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5)
REQUEST_TIMES_S = (0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 600.0)


class Metrics:
    """All series of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)  # CPU seconds, memory, open files
        self._unknown_names: set[str] = set()
        self.ttft = self._histogram("time_to_first_token_seconds", "from arrival to the first token", REQUEST_TIMES_S)
        self.itl = self._histogram("inter_token_latency_seconds", "between two hand-overs of a sample", TOKEN_TIMES_S)
        self.tpot = self._histogram("time_per_output_token_seconds", "mean of a request after its first", TOKEN_TIMES_S)
        self.e2e = self._histogram("request_latency_seconds", "from arrival to the last token", REQUEST_TIMES_S)
        self.queue = self._histogram("queue_time_seconds", "from arrival to admission", REQUEST_TIMES_S)
        self.media = self._histogram("media_wait_seconds", "waiting for decoded media", REQUEST_TIMES_S)
        self.prefill = self._histogram("prefill_seconds", "from media being ready to the first token", REQUEST_TIMES_S)
        self.prompt_tokens = self._counter("prompt_tokens", "tokens of prompts")
        self.generated_tokens = self._counter("generated_tokens", "tokens of answers")
        self.prefix_queries = self._counter("prefix_query_tokens", "prompt tokens looked for in the cache", "modality")
        self.prefix_hits = self._counter("prefix_hit_tokens", "prompt tokens found in the cache", "modality")
        self.prefilled = self._counter("prefilled_tokens", "prompt tokens computed", "modality")
        self.decoded_items = self._counter("decoded_items", "media decoded for a request")
        self.encoded_items = self._counter("encoded_items", "media run through the vision tower")
        self.media_items = self._counter("media_items", "media of requests that were answered", "kind")
        self.lowered_clips = self._counter("lowered_clips", "clips shown with fewer or smaller frames than asked for")
        self.finished = self._counter("samples_finished", "answers that ended", "reason")
        self.link_fetches = self._counter("link_fetches", "links that were to be fetched", "outcome")
        self.link_bytes = self._counter("link_fetch_bytes", "bytes of media fetched by link")
        self.link_time = self._histogram("link_fetch_seconds", "from its turn to its last byte", REQUEST_TIMES_S)
        self._cancels = self._counter("cancels", "requests whose client left or whose server stopped")
        self._refusals = self._counter("refusals", "requests refused or failed", "reason")
        self._unknown_fields = self._counter("unknown_request_fields", "request fields that were ignored", "field")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"prism_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> TimeHistogram:
        histogram = TimeHistogram(f"prism_{name}", text, buckets)
        self.registry.register(histogram)
        return histogram

    def expose(self) -> bytes:
        """The Prometheus text format."""
        return generate_latest(self.registry)

    def clock(self, request: GenerateRequest) -> RequestClock:
        return RequestClock(self, request)

    def refused(self, reason: str) -> None:
        self._refusals.labels(reason).inc()

    def cancelled(self) -> None:
        self._cancels.inc()

    def unknown_fields(self, names: Iterable[str]) -> None:
        """The set of label values is bounded: clients choose the names."""
        for name in names:
            if len(self._unknown_names) < MAX_UNKNOWN_FIELDS and FIELD_NAME.match(name):
                self._unknown_names.add(name)
            self._unknown_fields.labels(name if name in self._unknown_names else "other").inc()

    def link_fetched(self, report: FetchReport) -> None:
        self.link_fetches.labels(report.outcome).inc()
        self.link_bytes.inc(report.num_bytes)
        if report.time_s is not None:
            self.link_time.observe(report.time_s)

    def watch_links(self, fetcher: LinkFetcher) -> None:
        """From now on a scrape shows what is kept of links."""
        for name, text, read in (
            ("link_cache_links", "links whose content is kept", lambda: fetcher.stats().links_now),
            ("link_cache_bytes", "bytes kept of links", lambda: fetcher.stats().bytes_now),
        ):
            Gauge(f"prism_{name}", text, registry=self.registry).set_function(read)

    def watch_engine(self, engine: Engine) -> None:
        """From now on a scrape shows the engine's and the media caches' snapshots."""
        self.registry.register(EngineCollector(engine))


class TimeHistogram(Collector):
    """A histogram that one thread, the event loop's, feeds and reads: every token of every stream is observed, and the
    library's own, with its locks, costs ten times as much."""

    def __init__(self, name: str, text: str, bounds_s: Sequence[float]) -> None:
        self._name, self._text, self._bounds_s = name, text, bounds_s
        self._counts = [0] * (len(bounds_s) + 1)
        self._sum_s = 0.0

    def observe(self, time_s: float) -> None:
        self._counts[bisect_left(self._bounds_s, time_s)] += 1
        self._sum_s += time_s

    def collect(self) -> Iterator[Metric]:
        at_most = zip((*map(floatToGoString, self._bounds_s), "+Inf"), accumulate(self._counts), strict=True)
        buckets = [(bound, float(count)) for bound, count in at_most]
        yield HistogramMetricFamily(self._name, self._text, buckets, self._sum_s)


class RequestClock:
    """Turns the events of one request into observations."""

    def __init__(self, metrics: Metrics, request: GenerateRequest) -> None:
        self._metrics = metrics
        self._arrival_s = request.arrival_s
        self._vision_tokens = sum(span.rows for span in request.prompt.spans)
        self._kinds = [item.kind for item in request.media]
        self._first_s: float | None = None
        self._last_s: dict[int, float] = {}

    def observe(self, event: Event) -> None:
        match event:
            case TokenDelta():
                if event.token_ids:  # without ids: text that was held back
                    self._token(event.sample, time.monotonic())
            case SampleFinished(reason=reason):
                self._metrics.finished.labels(reason).inc()
            case RequestFinished():
                self._finished(event, time.monotonic())
            case _:
                pass

    def _token(self, sample: int, now_s: float) -> None:
        if self._first_s is None:
            self._first_s = now_s
            self._metrics.ttft.observe(now_s - self._arrival_s)
        before_s = self._last_s.get(sample)
        if before_s is not None:
            self._metrics.itl.observe(now_s - before_s)
        self._last_s[sample] = now_s

    def _finished(self, event: RequestFinished, now_s: float) -> None:
        metrics, usage, timings = self._metrics, event.usage, event.timings
        metrics.e2e.observe(now_s - self._arrival_s)
        metrics.queue.observe(timings.queue_ms / 1000)
        metrics.media.observe(timings.media_ms / 1000)
        metrics.prefill.observe(timings.prefill_ms / 1000)
        samples = max(1, len(self._last_s))
        later_tokens = usage.completion_tokens / samples - 1
        if self._first_s is not None and later_tokens > 0:
            metrics.tpot.observe((now_s - self._first_s) / later_tokens)
        metrics.prompt_tokens.inc(usage.prompt_tokens)
        metrics.generated_tokens.inc(usage.completion_tokens)
        for series, total, vision in (
            (metrics.prefix_queries, usage.prompt_tokens, self._vision_tokens),
            (metrics.prefix_hits, usage.cached_tokens, usage.cached_media_tokens),
            (metrics.prefilled, usage.prefilled_tokens, usage.prefilled_media_tokens),
        ):
            series.labels("text").inc(max(0, total - vision))
            series.labels("vision").inc(vision)
        metrics.decoded_items.inc(usage.decoded_items)
        metrics.encoded_items.inc(usage.encoded_items)
        metrics.lowered_clips.inc(usage.lowered_clips)
        for kind in self._kinds:
            metrics.media_items.labels(kind).inc()


class EngineCollector(Collector):
    """The engine's snapshot as gauges and counters, read at the time of a scrape."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def describe(self) -> Iterable[Metric]:
        return ()  # names depend on the engine's counters; registering must not need a snapshot

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        live_pages = stats.total_pages - stats.free_pages_now - stats.evictable_pages_now
        gauges: tuple[tuple[str, str, float], ...] = (
            ("requests_running", "requests with a place in the batch", stats.running_now),
            ("requests_waiting", "requests admitted to the queue", stats.waiting_now),
            ("uncached_tokens", "prompt tokens that are still to be computed", stats.uncached_tokens_now),
            ("kv_pages", "pages of the pool", stats.total_pages),
            ("kv_pages_free", "pages that hold nothing", stats.free_pages_now),
            ("kv_pages_cached_idle", "pages that only the cache refers to", stats.evictable_pages_now),
            ("kv_pages_live", "pages that running requests refer to", live_pages),
            (
                "kv_usage_ratio",
                "live pages of all, idle cached ones not",
                live_pages / max(1, stats.total_pages),
            ),
            ("kv_page_tokens", "tokens of a page", stats.page_tokens),
            ("host_slots", "pages that the host tier can hold", stats.host_slots_total),
            ("host_slots_used", "pages that the host tier holds", stats.host_slots_used_now),
            ("encoder_queue_items", "media that are being decoded or wait for the encoder", stats.encoder_queue_now),
            ("feature_cache_bytes", "encoder outputs held", stats.feature_bytes_now),
            ("feature_cache_capacity_bytes", "encoder outputs that can be held", stats.feature_bytes_capacity),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"prism_{name}", text, value)
        yield _cache_info(stats.page_tokens, stats.total_pages)
        yield CounterMetricFamily("prism_steps", "engine steps", stats.steps)
        for name, text in ENGINE_COUNTERS.items():
            yield CounterMetricFamily(f"prism_{name}", text, stats.counters.get(name, 0))
        for name in sorted(stats.counters.keys() - ENGINE_COUNTERS.keys() - {"steps"}):
            text = f"{name.replace('_', ' ')} in the engine"
            yield CounterMetricFamily(f"prism_engine_{name}", text, stats.counters[name])
        media = self._engine.media.stats()
        for prefix, group in (("media_cache", asdict(media.cache)), ("media_facts", asdict(media.facts))):
            for name, count in group.items():
                text = f"{prefix.replace('_', ' ')}: {name.replace('_', ' ')}"
                if name.endswith("_now") or name.startswith("capacity"):
                    yield GaugeMetricFamily(f"prism_{prefix}_{name.removesuffix('_now')}", text, count)
                else:
                    yield CounterMetricFamily(f"prism_{prefix}_{name}", text, count)


def _cache_info(page_tokens: int, total_pages: int) -> Metric:
    """What an endpoint picker of the Gateway API's inference extension reads the cache's size from, where it takes
    labels only (model server protocol, BlockSize and NumGPUBlocks)."""
    info = GaugeMetricFamily("prism_cache_config_info", "the paged cache", labels=["block_size", "num_gpu_blocks"])
    info.add_metric([str(page_tokens), str(total_pages)], 1)
    return info
