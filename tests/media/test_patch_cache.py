"""The shared cache: capacity in bytes, order, counters, single flight, failure and cancellation."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prism_server.errors import BadRequest, EngineFault
from prism_server.media.cache import Materialised, PatchCache, logger
from prism_server.media.facts_table import FactsTable
from prism_server.media.item import IsWanted, ItemFacts, ItemKey, Patches, Unwanted

ONE = 4 * 3 * 16 * 16
"""Bytes of the smallest item below."""
WAIT_S = 30


def key(name: int) -> ItemKey:
    return ItemKey(bytes([name]) * 32, b"layout" * 5)


def patches(value: int = 0, units: int = 1) -> Patches:
    return Patches((1, 2, 2 * units), np.full((4 * units, 3, 1, 16, 16), value, np.uint8))


class Gate:
    """A preparation that the test lets go."""

    def __init__(self, value: int = 0, error: BaseException | None = None) -> None:
        self.started, self.open = threading.Event(), threading.Event()
        self.calls = 0
        self._value, self._error = value, error

    def __call__(self, is_wanted: IsWanted) -> Patches:
        self.calls += 1
        self.started.set()
        assert self.open.wait(WAIT_S)
        if self._error is not None:
            raise self._error
        return patches(self._value)


@pytest.fixture
def worker() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def fetch(cache: PatchCache, name: int, pool: ThreadPoolExecutor, units: int = 1) -> Materialised:
    return cache.fetch(key(name), lambda _: patches(name, units), pool, "p").result(WAIT_S)


@pytest.mark.parametrize("capacity", [0, ONE])
def test_concurrent_requests_for_one_item_prepare_it_once(worker: ThreadPoolExecutor, capacity: int) -> None:
    cache, gate = PatchCache(capacity), Gate(5)
    futures: list[Future[Materialised]] = []
    threads = [
        threading.Thread(target=lambda: futures.append(cache.fetch(key(1), gate, worker, "p"))) for _ in range(32)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    gate.open.set()
    results = [future.result(WAIT_S) for future in futures]
    assert gate.calls == 1
    assert sorted(result.decoded for result in results) == [False] * 31 + [True]
    assert {id(result.patches) for result in results} == {id(results[0].patches)}
    stats = cache.stats()
    assert (stats.misses, stats.joins, stats.hits, stats.prepared, stats.in_flight_now) == (1, 31, 0, 1, 0)


def test_a_failed_preparation_fails_those_that_asked_for_it_and_is_not_cached(worker: ThreadPoolExecutor) -> None:
    cache, gate = PatchCache(ONE), Gate(error=BadRequest("half a picture", "someone.else"))
    futures = [cache.fetch(key(1), gate, worker, f"messages[{i}]") for i in range(3)]
    gate.open.set()
    for index, future in enumerate(futures):
        with pytest.raises(BadRequest, match="half a picture") as caught:
            future.result(WAIT_S)
        assert caught.value.param == f"messages[{index}]"
    assert cache.stats().items_now == cache.stats().in_flight_now == 0
    assert fetch(cache, 1, worker) == Materialised(fetch(cache, 1, worker).patches, decoded=True)
    assert (cache.stats().failed, cache.stats().prepared) == (1, 1)


def test_what_nobody_foresaw_is_a_refusal_of_that_medium_without_its_text_and_is_logged_once(
    worker: ThreadPoolExecutor, caplog: pytest.LogCaptureFixture
) -> None:
    cache, gate = PatchCache(ONE), Gate(error=ZeroDivisionError("secret of the inside"))
    futures = [cache.fetch(key(1), gate, worker, f"messages[{i}]") for i in range(2)]
    gate.open.set()
    for index, future in enumerate(futures):
        with pytest.raises(BadRequest) as caught:
            future.result(WAIT_S)
        error = caught.value
        assert (error.status, error.code, error.param) == (422, "media_failed", f"messages[{index}]")
        assert "secret" not in error.reason
        assert key(1).content_id.hex()[:12] in error.reason, "the log's line is found by it"
    [record] = [record for record in caplog.records if record.name == logger.name]  # what is collected may log, too
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError
    assert key(1).content_id.hex() in record.getMessage()


def test_the_cancellation_of_the_first_loses_none_of_those_that_wait(worker: ThreadPoolExecutor) -> None:
    cache, busy, gate = PatchCache(ONE), Gate(), Gate(7)
    cache.fetch(key(9), busy, worker, "p")
    first = cache.fetch(key(1), gate, worker, "p")
    second = cache.fetch(key(1), gate, worker, "p")
    assert first.cancel()
    busy.open.set()
    gate.open.set()
    assert second.result(WAIT_S).decoded, "the cost is counted with one that is still there"
    assert second.result().patches.pixels[0, 0, 0, 0, 0] == 7
    with pytest.raises(CancelledError):
        first.result(WAIT_S)


def test_a_preparation_that_nobody_waits_for_any_more_is_skipped(worker: ThreadPoolExecutor) -> None:
    cache, busy, gate = PatchCache(ONE), Gate(), Gate()
    cache.fetch(key(9), busy, worker, "p")
    assert cache.fetch(key(1), gate, worker, "p").cancel()
    busy.open.set()
    worker.submit(int).result(WAIT_S)
    assert gate.calls == 0
    assert cache.stats().in_flight_now == 0
    assert fetch(cache, 1, worker).decoded


def test_one_cancelled_while_it_is_prepared_still_fills_the_cache(worker: ThreadPoolExecutor) -> None:
    cache, gate = PatchCache(ONE), Gate()
    future = cache.fetch(key(1), gate, worker, "p")
    assert gate.started.wait(WAIT_S)
    assert future.cancel()
    gate.open.set()
    worker.submit(int).result(WAIT_S)
    assert not fetch(cache, 1, worker).decoded


def test_one_who_comes_while_a_preparation_gives_up_gets_it_from_the_start(worker: ThreadPoolExecutor) -> None:
    cache, gate = PatchCache(ONE), Gate(3)
    came_late: list[Future[Materialised]] = []

    def prepare(is_wanted: IsWanted) -> Patches:
        made = gate(is_wanted)
        if is_wanted():
            return made
        came_late.append(cache.fetch(key(1), Gate(), worker, "p"))
        raise Unwanted

    first = cache.fetch(key(1), prepare, worker, "p")
    assert gate.started.wait(WAIT_S)
    assert first.cancel()
    gate.open.set()
    worker.submit(int).result(WAIT_S)
    (late,) = came_late
    assert late.result(WAIT_S).decoded
    assert gate.calls == 2
    stats = cache.stats()
    assert (stats.misses, stats.joins, stats.prepared, stats.failed, stats.in_flight_now) == (1, 1, 1, 0, 0)


def test_workers_that_stop_fail_what_was_queued(worker: ThreadPoolExecutor) -> None:
    cache, busy = PatchCache(ONE), Gate()
    running = cache.fetch(key(9), busy, worker, "p")
    queued = cache.fetch(key(1), Gate(), worker, "p")
    assert busy.started.wait(WAIT_S)
    worker.shutdown(wait=False, cancel_futures=True)
    with pytest.raises(EngineFault, match="stopping"):
        queued.result(WAIT_S)
    busy.open.set()
    assert running.result(WAIT_S).decoded
    assert cache.stats().in_flight_now == 0


def test_capacity_of_one_item_keeps_the_last_and_counts(worker: ThreadPoolExecutor) -> None:
    cache = PatchCache(ONE)
    assert [fetch(cache, name, worker).decoded for name in (1, 1, 2, 1, 1)] == [True, False, True, True, False]
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.evictions, stats.items_now, stats.bytes_now) == (2, 3, 2, 1, ONE)


def test_capacity_zero_keeps_nothing_and_serves_everything(worker: ThreadPoolExecutor) -> None:
    cache = PatchCache(0)
    assert all(fetch(cache, 1, worker).decoded for _ in range(3))
    assert cache.stats().bytes_now == cache.stats().items_now == cache.stats().evictions == 0


def test_the_least_recently_used_leaves_first_and_one_too_large_evicts_nothing(worker: ThreadPoolExecutor) -> None:
    cache = PatchCache(3 * ONE)
    for name in (1, 2, 3, 1):
        fetch(cache, name, worker)
    fetch(cache, 8, worker, units=4)
    assert cache.stats().evictions == 0
    fetch(cache, 4, worker, units=2)
    assert [fetch(cache, name, worker).decoded for name in (1, 4)] == [False, False]
    assert cache.stats().evictions == 2


class CacheMachine(RuleBasedStateMachine):
    """Random fetches against a list in order of use."""

    def __init__(self) -> None:
        super().__init__()
        self.cache, self.pool = PatchCache(4 * ONE), ThreadPoolExecutor(1)
        self.used: list[tuple[int, int]] = []

    @rule(name=st.integers(0, 9))
    def fetch(self, name: int) -> None:
        units = 1 + name % 5
        known = [entry for entry in self.used if entry[0] == name]
        assert fetch(self.cache, name, self.pool, units).decoded == (not known)
        self.used = [entry for entry in self.used if entry[0] != name]
        if units <= 4:
            self.used.append((name, units))
        while sum(units for _, units in self.used) > 4:
            self.used.pop(0)

    @invariant()
    def bytes_are_those_of_the_kept(self) -> None:
        stats = self.cache.stats()
        assert stats.bytes_now == sum(units for _, units in self.used) * ONE <= stats.capacity_bytes
        assert stats.items_now == len(self.used)

    def teardown(self) -> None:
        self.pool.shutdown()


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=20, stateful_step_count=30, deadline=None)


def test_the_facts_table_forgets_the_least_recently_used_first() -> None:
    table = FactsTable(2)
    for name in (1, 2):
        table.put(ItemFacts(key(name), "image", (1, 2, 2), 1, 32, 32))
    assert table.get(key(1)) is not None
    table.put(ItemFacts(key(3), "image", (1, 2, 2), 1, 32, 32))
    assert [table.get(key(name)) is None for name in (1, 2, 3)] == [False, True, False]
    stats = table.stats()
    assert (stats.hits, stats.misses, stats.evictions, stats.items_now) == (3, 1, 1, 2)
