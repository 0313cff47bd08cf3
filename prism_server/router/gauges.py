"""What a scrape reads from the router's state."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from prometheus_client.core import Metric

from prism_server.router.metrics import counter, gauge, gauge_by_pod
from prism_server.router.services import Services


def read_gauges(services: Services) -> Iterator[Metric]:
    """Event loop only."""
    now_s = asyncio.get_running_loop().time()
    fleet, members = services.fleet, services.members.all()
    stats = fleet.stats()
    age_s = services.discovery.age_s(now_s)
    flying = [(member.endpoint.name, float(fleet.in_flight(member.endpoint.uid))) for member in members]
    ages = [(member.endpoint.name, fleet.answer_age_s(member.endpoint.uid, now_s)) for member in members]
    mean = sum(count for _, count in flying) / max(1, len(flying))
    yield gauge("pods", "pods that discovery has found", stats.pods_now)
    yield gauge("pods_accepting", "pods that may be given requests", stats.accepting_pods_now)
    yield gauge("open_requests", "requests between arrival and last byte", services.lifecycle.inside)
    yield gauge("buffered_bytes", "bodies of requests that have no answer yet", services.buffers.held_bytes)
    yield gauge("in_flight", "requests at pods", stats.in_flight_now)
    yield gauge_by_pod("pod_in_flight", "requests at the pod", flying)
    yield gauge(
        "imbalance_ratio",
        "requests at the busiest pod over the mean of all; 1 with none",
        max((count for _, count in flying), default=0.0) / mean if mean else 1.0,
    )
    yield gauge("index_chains", "media chains known to be held by pods", stats.chains_now)
    yield gauge("index_features", "encoder outputs known to be held by pods", stats.features_now)
    yield gauge("index_expected", "media that requests under way will leave at pods", stats.expected_now)
    yield gauge("index_links", "links whose content is known", stats.links_now)
    yield gauge_by_pod(
        "index_age_seconds", "since the pod last said what it holds", [(n, a) for n, a in ages if a is not None]
    )
    yield gauge_by_pod(
        "breaker_open", "1 while the pod is left alone", [(m.endpoint.name, 1.0 - m.breaker.is_closed) for m in members]
    )
    if age_s is not None:
        yield gauge("discovery_age_seconds", "since the source of pods last confirmed them; 0 while followed", age_s)
    yield gauge("key_version_mismatch_pods", "pods whose keys this router cannot compute", stats.unknown_key_pods_now)
    yield counter(
        "key_version_mismatches", "requests placed at pods whose keys are unknown", stats.unknown_key_decisions
    )
    yield counter("index_snapshots", "whole inventories taken in", stats.snapshots)
    yield counter("index_epochs_lost", "times that a pod's cache began anew", stats.epochs_lost)
    yield counter("index_dropped_keys", "keys not kept, because a pod reported more than the bound", stats.dropped_keys)
