"""What the operator needs to know about an engine pod, read from the API server's objects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

Body = Mapping[str, Any]

REVISION_LABEL = "controller-revision-hash"
FAILED_CREATE, SUCCESSFUL_CREATE = "FailedCreate", "SuccessfulCreate"
"""Reasons of the events that the controllers of StatefulSets and Jobs post on them, for each pod that they make or
cannot make."""
UNSCHEDULED = "FailedScheduling"
"""Reason of the scheduler's events on a pod that has no node yet."""
UNSTARTED_REASONS = frozenset({"ContainerCreating", "PodInitializing"})
"""Waiting reasons of a pod that is merely young."""
MESSAGE_CHARS = 1024
NO_IMAGE = "ImagePullBackOff"
"""The one reason of an image that does not come: the kubelet's words for it change with each of its tries."""
_NO_IMAGE_WORDS = ("ErrImagePull", "ImagePullBackOff")
_NO_IMAGE_NOTES = (*_NO_IMAGE_WORDS, "ailed to pull image")


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why a pod does not come up, in its own words."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One engine pod. Times are seconds since the epoch."""

    name: str
    uid: str
    revision: str
    ordinal: int
    is_ready: bool = False
    is_terminating: bool = False
    is_finished: bool = False
    """It has failed as a whole or has ended, as an evicted pod has: it will never run again."""
    unready_since_s: float = 0.0
    """When it was last ready, or made; of no meaning while it is ready."""
    gone_by_s: float | None = None
    """When its grace ends; None unless it is terminating."""
    node: str = ""
    ip: str = ""
    trouble: Trouble | None = None
    is_held_back: bool = False
    """Scheduled, but a volume, a Secret or a ConfigMap keeps its containers from being made."""

    @classmethod
    def from_object(cls, body: Body) -> Pod:
        metadata, status = body["metadata"], body.get("status", {})
        deleted = metadata.get("deletionTimestamp")
        ordinal = metadata["name"].rpartition("-")[2]
        trouble = find_trouble(body)
        ready = condition(body, "Ready")
        return cls(
            name=metadata["name"],
            uid=metadata["uid"],
            revision=metadata.get("labels", {}).get(REVISION_LABEL, ""),
            ordinal=int(ordinal) if ordinal.isdigit() else -1,
            is_ready=ready is not None and ready["status"] == "True" and deleted is None,
            is_terminating=deleted is not None,
            is_finished=status.get("phase") in ("Failed", "Succeeded"),
            unready_since_s=_changed_s(ready) or seconds(metadata["creationTimestamp"]),
            gone_by_s=seconds(deleted) if deleted else None,  # the API server adds the grace to the time of the call
            node=body.get("spec", {}).get("nodeName", ""),
            ip=status.get("podIP", ""),
            trouble=trouble,
            is_held_back=trouble is None and deleted is None and _is_held_back(body),
        )


def seconds(timestamp: str) -> float:
    """Of a Kubernetes timestamp (RFC 3339), since the epoch."""
    return datetime.fromisoformat(timestamp.replace("Z", "+00:00")).timestamp()


def condition(body: Body, kind: str) -> Body | None:
    """The condition of that type in an object's status."""
    return next((c for c in body.get("status", {}).get("conditions") or () if c["type"] == kind), None)


def find_trouble(body: Body) -> Trouble | None:
    """What stops this pod: not schedulable, an image that does not come, a container that ends; None if nothing says.

    A container that has ended and runs again tells of its last end only while it is not ready.
    """
    scheduled = condition(body, "PodScheduled")
    if scheduled is not None and scheduled["status"] == "False":
        return _trouble(scheduled.get("reason", "Unschedulable"), scheduled.get("message", ""))
    status = body.get("status", {})
    if status.get("phase") == "Failed":
        return _trouble(status.get("reason", "Failed"), status.get("message", ""))
    containers = (*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ()))
    return next(filter(None, map(_container_trouble, containers)), None)


def _changed_s(found: Body | None) -> float | None:
    changed = found.get("lastTransitionTime") if found is not None else None
    return seconds(changed) if changed else None


def _container_trouble(status: Body) -> Trouble | None:
    if status.get("ready"):
        return None
    now, before = status.get("state", {}), status.get("lastState", {})
    ended = now.get("terminated") or before.get("terminated")
    waiting = now.get("waiting")
    if ended is not None and (ended.get("exitCode", 0) != 0 or waiting is not None):
        reason = ended.get("reason", "Error")
        how = f"{status['name']} ended with exit code {ended.get('exitCode')}: "
        said = (ended.get("message") or "").strip() or reason
        return Trouble(reason, how + said[-(MESSAGE_CHARS - len(how)) :])  # the reason is what it said last
    if waiting is not None and waiting.get("reason", "ContainerCreating") not in UNSTARTED_REASONS:
        reason = NO_IMAGE if waiting["reason"] in _NO_IMAGE_WORDS else waiting["reason"]
        return _trouble(reason, waiting.get("message", ""))
    return None


def _is_held_back(body: Body) -> bool:
    statuses = body.get("status", {}).get("containerStatuses") or ()
    return bool(body.get("spec", {}).get("nodeName")) and all(
        "waiting" in status.get("state", {}) and status["state"]["waiting"].get("reason") in UNSTARTED_REASONS
        for status in statuses
    )


def _trouble(reason: str, message: str) -> Trouble:
    return Trouble(reason, message[:MESSAGE_CHARS])


def last_seen_s(event: Body) -> float:
    """When an Event happened last, in seconds since the epoch; it may have been posted in either of its two forms."""
    latest = (event.get("series") or {}).get("lastObservedTime") or event.get("lastTimestamp") or event.get("eventTime")
    return seconds(latest or event["metadata"]["creationTimestamp"])


def held_back_by(events: Iterable[Body]) -> Trouble | None:
    """What keeps the containers of a pod that has a node from being made, in the words of the pod's events.

    What is over does not count: that there was no node, and what came before an image was pulled, which the kubelet
    does when all volumes are there. Of two words of one second the longer one says more.
    """
    told = list(events)
    pulls_s = [last_seen_s(event) for event in told if event.get("reason") in ("Pulling", "Pulled")]
    mounted_s = max(pulls_s, default=float("-inf"))
    troubles = [
        event
        for event in told
        if event.get("type") == "Warning" and event.get("reason") != UNSCHEDULED and last_seen_s(event) > mounted_s
    ]
    if not troubles:
        return None
    last = max(troubles, key=lambda event: (last_seen_s(event), len(event.get("message", ""))))
    reason, message = last.get("reason", "Held"), last.get("message", "")
    is_image = reason == "Failed" and any(note in message for note in _NO_IMAGE_NOTES)
    return _trouble(NO_IMAGE if is_image else reason, message)


def creation_refused(events: Iterable[Body]) -> Trouble | None:
    """Why no further pod may be made, in the words of a workload's events: StatefulSets and Jobs have no condition for
    that. None where the last pod could be made."""
    told = [event for event in events if event.get("reason") in (FAILED_CREATE, SUCCESSFUL_CREATE)]
    last = max(told, key=lambda event: (last_seen_s(event), event["reason"] == FAILED_CREATE), default=None)
    if last is None or last["reason"] != FAILED_CREATE:
        return None
    return _trouble(FAILED_CREATE, last.get("message", ""))


def lost_nodes(nodes: Iterable[Body]) -> frozenset[str]:
    """Names of the nodes that are not known to be ready."""
    return frozenset(
        node["metadata"]["name"]
        for node in nodes
        if (ready := condition(node, "Ready")) is None or ready["status"] != "True"
    )
