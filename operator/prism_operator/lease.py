"""One operator at a time: a Lease is held before anything is watched, and losing it ends the process.

Clocks of two machines are never compared. A holder is taken for gone when its record has not changed for a whole lease
duration of this process's own clock, as client-go does; the holder gives up earlier, at the renew deadline.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prism_operator.api import LEASE, Api, ApiError, Conflict, NotFound, Object
from prism_operator.options import OperatorOptions

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Seen:
    """The holder's record when it was last another one, and when that was (seconds of this process's clock)."""

    record: tuple[str, str] = ("", "")
    since_s: float = 0.0

    def updated(self, lease: Mapping[str, Any], now_s: float) -> Seen:
        spec = lease.get("spec") or {}
        record = (str(spec.get("holderIdentity") or ""), str(spec.get("renewTime") or ""))
        return self if record == self.record else Seen(record, now_s)


def may_take(lease: Mapping[str, Any], seen: Seen, identity: str, now_s: float) -> bool:
    """Whether the Lease is ours, free, or has not been renewed for its whole duration. `seen` is up to date."""
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity") or ""
    return holder in ("", identity) or now_s - seen.since_s >= float(spec.get("leaseDurationSeconds") or 0)


class Elector:
    """Holds the operator's Lease. `identity` is unique to this process."""

    def __init__(
        self, api: Api, options: OperatorOptions, identity: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._api = api
        self._options = options
        self._identity = identity
        self._clock = clock
        self._seen = Seen()
        self._held_since_s: float | None = None  # when the call began that took the Lease

    def try_hold(self) -> bool:
        """Takes or renews the Lease. False: another holds it, or was faster. Raises ApiError."""
        namespace, name = self._options.operator_namespace, self._options.operator_name
        try:
            lease = self._api.get(LEASE, namespace, name)
        except NotFound:
            lease = {"apiVersion": LEASE.api_version, "kind": LEASE.kind, "metadata": {"name": name}, "spec": {}}
        self._seen = self._seen.updated(lease, self._clock())
        if not may_take(lease, self._seen, self._identity, self._clock()):
            return False
        wanted = self._claimed(lease)
        try:
            if "resourceVersion" in lease["metadata"]:
                self._api.replace(LEASE, namespace, wanted)
            else:
                self._api.create(LEASE, namespace, wanted)
        except Conflict:
            return False
        return True

    def wait(self, stop: threading.Event, beat: Callable[[], None]) -> bool:
        """Blocks until the Lease is held, with a `beat` for every try. False: `stop` was set first."""
        while not stop.is_set():
            beat()
            began_s = self._clock()
            try:
                if self.try_hold():
                    self._held_since_s = began_s
                    log.info("holding Lease %s as %s", self._options.operator_name, self._identity)
                    return True
            except ApiError as error:
                log.warning("cannot ask for the Lease: %s", error)
            stop.wait(self._options.lease_retry_s)
        return False

    def keep(self, stop: threading.Event, lost: Callable[[str], None]) -> None:
        """Renews until `stop`; calls `lost` once, when another holds it or no renewal came through in time.

        In time is counted from when the last good renewal began, and a call that hangs is not waited for: before
        another operator may take the Lease, this one has ended. No error gets past it, or nobody would renew.
        """
        deadline_s, retry_s = self._options.lease_renew_deadline_s, self._options.lease_retry_s
        renewed_s, trouble = self._clock() if self._held_since_s is None else self._held_since_s, "no answer"
        with ThreadPoolExecutor(1, "lease-call") as calls:
            while not stop.wait(min(retry_s, max(renewed_s + deadline_s - self._clock(), 0.0))):
                began_s = self._clock()
                try:
                    is_held = calls.submit(self.try_hold).result(max(renewed_s + deadline_s - began_s, 0.0))
                except TimeoutError:
                    reason = f"no renewal within {deadline_s:g} s: {trouble}"
                except Exception as error:
                    trouble = str(error)
                    log.warning("cannot renew the Lease yet: %s", trouble)
                    continue
                else:
                    reason = "another operator holds it"
                    if is_held:
                        renewed_s, trouble = began_s, "no answer"
                        continue
                if not stop.is_set():
                    lost(reason)
                return

    def release(self) -> None:
        """Lets the next one in at once. Only when nothing of this process writes any more."""
        namespace, name = self._options.operator_namespace, self._options.operator_name
        try:
            lease = self._api.get(LEASE, namespace, name)
            if lease["spec"].get("holderIdentity") == self._identity:
                lease["spec"]["holderIdentity"] = ""
                self._api.replace(LEASE, namespace, lease)
        except ApiError as error:
            log.warning("cannot release the Lease, it will run out: %s", error)

    def _claimed(self, lease: Object) -> Object:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec = {**(lease.get("spec") or {})}
        if spec.get("holderIdentity") != self._identity:
            spec["acquireTime"] = now
            spec["leaseTransitions"] = int(spec.get("leaseTransitions") or 0) + 1
        spec |= {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": max(1, round(self._options.lease_duration_s)),
            "renewTime": now,
        }
        return {**lease, "spec": spec}
