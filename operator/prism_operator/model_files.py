"""Where the model's files stand: the claim, the loader's Job, the volume of the pods. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prism_operator.crd.status import ConditionStatus
from prism_operator.pods import condition, seconds
from prism_operator.snapshot import Snapshot

Answer = tuple[ConditionStatus, str, str]
"""Status, reason, message."""

SHARED_ACCESS_MODES = frozenset({"ReadWriteMany", "ReadOnlyMany"})


def model_files(snapshot: Snapshot) -> Answer:
    """Ready, not ready with the reason, or not known."""
    if snapshot.spec is None:
        return "Unknown", "SpecUnreadable", "the spec cannot be read"
    source = snapshot.spec.model.source
    if source.demo is not None:
        return "True", "Bundled", "the model is part of the image"
    if source.hugging_face is not None:
        return _claim_problem(snapshot, source.hugging_face.storage.claim_name) or _download(snapshot)
    if source.pvc is not None:
        return _claim_problem(snapshot, source.pvc.claim_name) or _as_pods_say(snapshot)
    return _as_pods_say(snapshot)


def _claim_problem(snapshot: Snapshot, claim_name: str | None) -> Answer | None:
    if snapshot.claim is None:
        if claim_name is None:
            return "Unknown", "ClaimNotMade", "the claim for the download is not there yet"
        return "False", "ClaimNotFound", f"there is no PersistentVolumeClaim {claim_name}"
    spec, name = snapshot.claim.get("spec", {}), snapshot.claim["metadata"]["name"]
    modes = snapshot.claim.get("status", {}).get("accessModes") or spec.get("accessModes") or ()
    replicas = snapshot.spec.replicas if snapshot.spec is not None else 0
    if replicas > 1 and not SHARED_ACCESS_MODES & set(modes):
        told = ", ".join(modes) or "no access mode"
        return "False", "AccessMode", f"{replicas} replicas need ReadWriteMany or ReadOnlyMany, claim {name} has {told}"
    return None


def is_complete(job: Mapping[str, Any] | None) -> bool:
    """Whether the loader's Job has ended well."""
    complete = condition(job, "Complete") if job is not None else None
    return complete is not None and complete["status"] == "True"


def is_lost(job: Mapping[str, Any], claim: Mapping[str, Any] | None) -> bool:
    """Whether what this Job has downloaded went with a claim that somebody has deleted: there is a younger one."""
    ended = job.get("status", {}).get("completionTime")
    if claim is None or not ended or not is_complete(job) or claim["metadata"]["name"] not in claims_of(job):
        return False
    return seconds(ended) < seconds(claim["metadata"]["creationTimestamp"])


def claims_of(job: Mapping[str, Any]) -> list[str]:
    """Names of the claims that a loader's Job writes to."""
    volumes = job["spec"]["template"]["spec"].get("volumes") or ()
    return [volume["persistentVolumeClaim"]["claimName"] for volume in volumes if "persistentVolumeClaim" in volume]


def _download(snapshot: Snapshot) -> Answer:
    job, trouble = snapshot.loader_job, snapshot.loader_trouble
    if job is None:
        return "Unknown", "LoaderNotMade", "the loader's Job is not there yet"
    if is_complete(job):
        return "True", "Downloaded", f"Job {job['metadata']['name']} has ended well"
    failed = condition(job, "Failed")
    if trouble is not None:  # the loader's own last words: a missing token, a refused one, a full disk
        return "False", trouble.reason, trouble.message
    if failed is not None and failed["status"] == "True":
        return "False", failed.get("reason", "LoaderFailed"), failed.get("message", "")
    return "False", "Downloading", f"Job {job['metadata']['name']} runs"


def _as_pods_say(snapshot: Snapshot) -> Answer:
    """A volume that is mounted shows in a pod that runs."""
    if any(pod.is_ready and pod.revision == _revision(snapshot) for pod in snapshot.pods):
        return "True", "Loaded", "a pod of the newest revision has loaded it"
    for pod in snapshot.pods:
        if pod.trouble is not None and not pod.is_ready:
            return "False", pod.trouble.reason, f"{pod.name}: {pod.trouble.message}"
    return "Unknown", "NotLoadedYet", "no pod has loaded it yet"


def _revision(snapshot: Snapshot) -> str | None:
    return snapshot.serving.desired_revision if snapshot.serving is not None else None
