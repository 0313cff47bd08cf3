"""Prepared patches, shared by all requests: kept up to a capacity in bytes, each prepared once however many ask."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field

from prism_server.errors import BadRequest, EngineFault, PrismError
from prism_server.media.item import IsWanted, ItemKey, Patches, Unwanted

MEDIA_FAILED = "media_failed"
"""Code of a medium at which the server's own code failed. About the request: another pod would fail in the same way."""
UNPROCESSABLE = 422
NAME_DIGITS = 12
"""Hexadecimal, of a content id: enough for people to find it in a log."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Materialised:
    """An item's patches. `decoded`: they were prepared for this call; False: found, or prepared for another's."""

    patches: Patches
    decoded: bool


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters only grow (`hits + joins + misses` = calls); gauges are marked `_now`."""

    hits: int
    joins: int
    """Calls that found their item being prepared and waited for it."""
    misses: int
    prepared: int
    failed: int
    evictions: int
    items_now: int
    bytes_now: int
    in_flight_now: int
    capacity_bytes: int


@dataclass(slots=True)
class _Flight:
    """One preparation, queued or running, and those who wait for it: each with the request field to blame."""

    waiters: list[tuple[Future[Materialised], str]] = field(default_factory=list)

    def is_wanted(self) -> bool:
        return not all(future.cancelled() for future, _ in self.waiters)


class PatchCache:
    """ItemKey -> Patches, least recently used out first, with single flight. Any thread may call it.

    What does not fit into the capacity is handed over and forgotten; capacity 0 keeps nothing and still prepares once
    for all who ask at the same time.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"a capacity cannot be {capacity_bytes} bytes")
        self._capacity_bytes = capacity_bytes
        self._kept: OrderedDict[ItemKey, Patches] = OrderedDict()
        self._flights: dict[ItemKey, _Flight] = {}
        self._lock = threading.Lock()
        self._hits = self._joins = self._misses = self._prepared = self._failed = self._evictions = 0
        self._bytes_now = 0

    def fetch(
        self, key: ItemKey, prepare: Callable[[IsWanted], Patches], workers: Executor, param: str
    ) -> Future[Materialised]:
        """The item's patches: at once if they are kept, else when `prepare` has run in `workers`.

        Every caller has a future of its own, so cancelling one never takes the item from another. A preparation that
        nobody waits for any more is skipped; one that runs may find out by its argument and end in Unwanted. A failure
        is a PrismError that reaches all who wait and is not kept; a BadRequest names each caller's own `param`. The
        futures complete on a worker thread.
        """
        future: Future[Materialised] = Future()
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None:
                self._hits += 1
                self._kept.move_to_end(key)
                future.set_result(Materialised(kept, decoded=False))
                return future
            flight = self._flights.get(key)
            if flight is not None:
                self._joins += 1
                flight.waiters.append((future, param))
                return future
            self._misses += 1
            flight = _Flight([(future, param)])
            task = workers.submit(self._run, key, flight, prepare)
            self._flights[key] = flight
        task.add_done_callback(lambda done: self._abandon(key, flight) if done.cancelled() else None)
        return future

    def stats(self) -> CacheStats:
        with self._lock:
            return CacheStats(
                hits=self._hits,
                joins=self._joins,
                misses=self._misses,
                prepared=self._prepared,
                failed=self._failed,
                evictions=self._evictions,
                items_now=len(self._kept),
                bytes_now=self._bytes_now,
                in_flight_now=len(self._flights),
                capacity_bytes=self._capacity_bytes,
            )

    def _run(self, key: ItemKey, flight: _Flight, prepare: Callable[[IsWanted], Patches]) -> None:
        patches: Patches | None = None
        while patches is None:
            with self._lock:
                if not flight.is_wanted():
                    del self._flights[key]
                    return
            try:
                patches = prepare(flight.is_wanted)
            except Unwanted:
                continue  # unless somebody has come in between: then from the start
            except BaseException as error:  # whatever it is, it belongs to those who wait
                with self._lock:
                    self._failed += 1
                    del self._flights[key]
                _fail(flight, error if isinstance(error, PrismError) else media_failed(key, error))
                return
        with self._lock:
            self._prepared += 1
            self._keep(key, patches)
            del self._flights[key]  # in one step with keeping: nobody finds neither and prepares again
        decoded = True
        for future, _ in flight.waiters:
            if future.set_running_or_notify_cancel():
                future.set_result(Materialised(patches, decoded))
                decoded = False

    def _keep(self, key: ItemKey, patches: Patches) -> None:
        if patches.num_bytes > self._capacity_bytes:
            return
        self._kept[key] = patches
        self._bytes_now += patches.num_bytes
        while self._bytes_now > self._capacity_bytes:
            _, evicted = self._kept.popitem(last=False)
            self._bytes_now -= evicted.num_bytes
            self._evictions += 1

    def _abandon(self, key: ItemKey, flight: _Flight) -> None:
        """The workers stopped before they began this flight."""
        with self._lock:
            del self._flights[key]
        _fail(flight, EngineFault("the server is stopping; the medium was not prepared"))


def media_failed(key: ItemKey, error: BaseException, param: str | None = None) -> BadRequest:
    """The refusal of one medium at which something unforeseen was raised: that is for the log, not for the client.

    Several requests may wait for the medium, so the log names it by its content, and the refusal does the same.
    """
    name = key.content_id.hex()
    logger.error("medium %s could not be prepared", name, exc_info=error)
    reason = f"the medium could not be prepared: the server failed at it, and its log says why: {name[:NAME_DIGITS]}"
    return BadRequest(reason, param, UNPROCESSABLE, MEDIA_FAILED)


def _fail(flight: _Flight, error: PrismError) -> None:
    for future, param in flight.waiters:
        if future.set_running_or_notify_cancel():
            mine = BadRequest(error.reason, param, error.status, error.code) if isinstance(error, BadRequest) else error
            future.set_exception(mine)
