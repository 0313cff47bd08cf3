"""The operator's process: waits for its Lease, watches, works through the queue, resyncs, and ends when it should."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import signal
import socket
import threading
import time
import uuid

from prism_operator import handlers
from prism_operator.api import CUSTOM_RESOURCE_DEFINITION, PRISM_DEPLOYMENT, Api, ApiError, Forbidden
from prism_operator.crd.base import GROUP, PLURAL
from prism_operator.crd.schema import missing_fields
from prism_operator.deployment import class_of
from prism_operator.health import Health, serve_health
from prism_operator.lease import Elector
from prism_operator.metrics import Metrics
from prism_operator.observe import ClusterFacts
from prism_operator.options import OperatorOptions
from prism_operator.queue import Key, KeyQueue
from prism_operator.reconcile import Reconciler, Requeue
from prism_operator.tokens import operator_key

WORKERS = 4
RESYNC_SPREAD = 0.2
"""Keys of a resync come over this part of its interval, not all at once."""
CRD_RETRY_S = 5.0

log = logging.getLogger(__name__)


class Operator:
    """One run of `prism-operator`."""

    def __init__(self, api: Api, options: OperatorOptions) -> None:
        self._api = api
        self._options = options
        self._health = Health(options.liveness_resyncs * options.resync_s)
        self._metrics = Metrics()
        self._stop = threading.Event()

    def run(self) -> int:
        """Blocks; returns the exit code. A lost Lease ends the process from within, with 1."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._stop.set())
        serve_health(self._health, self._options.health_port)
        self._metrics.serve(self._options.metrics_port)
        elector = Elector(self._api, self._options, f"{socket.gethostname()}_{uuid.uuid4().hex[:8]}")
        if not elector.wait(self._stop, self._health.beat):
            return 0
        kept = threading.Event()
        keeper = threading.Thread(target=elector.keep, args=(kept, _end_at_once), name="lease", daemon=True)
        keeper.start()
        try:
            if self._wait_for_crd():
                asyncio.run(self._lead())
            return 0
        except Exception:
            log.exception("the operator has failed")
            return 1
        finally:
            kept.set()
            keeper.join(self._options.lease_renew_deadline_s)  # a renewal under way would take it again
            elector.release()

    def _wait_for_crd(self) -> bool:
        """A watch of a kind that is not served would never start. False: the process shall stop."""
        while not self._stop.is_set():
            self._health.beat()
            try:
                if self._api.has(PRISM_DEPLOYMENT):
                    self._compare_schema()
                    return True
                log.warning("this cluster has no %s.%s yet", PLURAL, GROUP)
            except ApiError as error:
                log.warning("cannot ask for %s.%s: %s", PLURAL, GROUP, error)
            self._stop.wait(CRD_RETRY_S)
        return False

    def _compare_schema(self) -> None:
        try:
            installed = self._api.get(CUSTOM_RESOURCE_DEFINITION, "", f"{PLURAL}.{GROUP}")
        except Forbidden:
            return  # one namespace with Roles only
        lacking = missing_fields(installed)
        if lacking:
            log.warning("the installed CRD is older than this operator and lacks: %s", ", ".join(lacking))

    async def _lead(self) -> None:
        key = await asyncio.to_thread(operator_key, self._api, self._options)
        facts = ClusterFacts(self._api)
        missing = await asyncio.to_thread(facts.missing)
        if missing:
            log.info("optional APIs that this cluster lacks: %s", ", ".join(sorted(missing)))
        queue, reconciler = KeyQueue(), Reconciler(self._api, self._options, key)
        self._metrics.observe(
            queue=lambda: len(queue),
            resync_age_s=lambda: self._health.resync_age_s,
            writes=lambda: self._api.num_writes,
        )
        watches = handlers.Watches(self._options, queue, self._health, self._metrics)
        workers = [asyncio.create_task(self._work(queue, reconciler)) for _ in range(WORKERS)]
        resync = asyncio.create_task(self._resync(queue))
        try:
            if not self._stop.is_set():  # from here on kopf hears the signals
                await handlers.watch(self._api, self._options, watches, missing)
        finally:
            for task in (*workers, resync):
                task.cancel()
            await asyncio.gather(*workers, resync, return_exceptions=True)

    async def _work(self, queue: KeyQueue, reconciler: Reconciler) -> None:
        while True:
            key = await queue.take()
            running = asyncio.create_task(asyncio.to_thread(self._pass, reconciler, key))
            try:
                requeue = await asyncio.shield(running)
            except asyncio.CancelledError:
                await asyncio.wait([running])  # what a pass has begun it ends, while the Lease is held
                raise
            except Exception as error:
                pause_s = queue.failed(key)
                where, is_known = f"{key.namespace}/{key.name}", isinstance(error, ApiError)
                log.warning("%s: %s; again in %.1f s", where, error, pause_s, exc_info=not is_known)
                continue
            queue.done(key)
            if requeue is not None:
                queue.add(key, requeue.after_s)

    def _pass(self, reconciler: Reconciler, key: Key) -> Requeue | None:
        started_s, result = time.monotonic(), "error"
        try:
            requeue = reconciler.reconcile(key.namespace, key.name)
            result = "ok"
            return requeue
        finally:
            self._metrics.passes.labels(result).inc()
            self._metrics.pass_seconds.observe(time.monotonic() - started_s)

    async def _resync(self, queue: KeyQueue) -> None:
        """Every object, whatever the watch has told or not."""
        interval_s = self._options.resync_s
        while True:
            try:
                bodies = await asyncio.to_thread(self._api.list, PRISM_DEPLOYMENT, self._options.namespace)
            except ApiError as error:
                log.warning("cannot resync: %s", error)
                await asyncio.sleep(interval_s / 4)
                continue
            versions, ours = {}, []
            for body in bodies:
                metadata = body["metadata"]
                key = Key(metadata["namespace"], metadata["name"])
                versions[key] = metadata["resourceVersion"]
                if class_of(body) == self._options.operator_class:
                    ours.append(body)
                    queue.add(key, random.uniform(0, interval_s * RESYNC_SPREAD))
            self._health.resynced(versions)
            self._metrics.resynced(ours)
            await asyncio.sleep(interval_s * random.uniform(1 - RESYNC_SPREAD, 1))


def _end_at_once(reason: str) -> None:
    """Another operator may write now: not one more call from here."""
    log.error("lost the Lease (%s): ending", reason)
    logging.shutdown()
    os._exit(1)
