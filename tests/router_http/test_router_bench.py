"""The measurement of the router measures what it says; no speed is asserted."""

from __future__ import annotations

from prism_server.bench.router_latency import RouterPlan, measure_router


def test_both_ways_are_measured_and_every_stream_comes_to_its_end() -> None:
    costs = measure_router(RouterPlan(rounds=4, num_streams=10, stream_s=1.0))
    assert [added.body_bytes > 5_000_000 for added in costs.added] == [False, True]
    assert [(streams.name, streams.num_finished) for streams in costs.streams] == [("direct", 10), ("routed", 10)]
    assert all(text in costs.table() for text in ("5 MB, eight pictures", "livez"))
