"""Engines come and go under load, and nobody who asks notices. One deployment, from two engines to one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from kubernetes import client

from e2e.cluster.layout import REGISTRY
from e2e.harness import PATIENCE_S, Cluster, Object, eventually
from e2e.load import AT_HOME, homes, long_answer_of, readers, steady_load
from e2e.prism import Deployed, invoice_pages, new_namespace, prism_deployment
from e2e.watches import PODS, PRISM_DEPLOYMENTS, watching

STREAM_S = 30
MOST_TOKENS = 7800
"""What the bundled model's context holds."""
PAGES = [invoice_pages(seed)[0] for seed in range(400, 404)]
ABSENT_IMAGE = f"{REGISTRY}/prism-server-cpu:absent"


@dataclass
class PodHistory:
    """Every change of a deployment's engine pods, by UID, in the API server's order."""

    ready: set[str] = field(default_factory=set)
    """Ready, and not told to go."""
    fewest_ready: int | None = None
    leaving_s: dict[str, float] = field(default_factory=dict)
    leaving_version: dict[str, int] = field(default_factory=dict)
    """Of the pod, when it was told to go."""
    gone_s: dict[str, float] = field(default_factory=dict)

    def take(self, kind: str, pod: Object) -> None:
        """One event of the watch."""
        metadata = pod["metadata"]
        uid, is_gone, is_leaving = metadata["uid"], kind == "DELETED", "deletionTimestamp" in metadata
        conditions = {c["type"]: c["status"] for c in pod["status"].get("conditions", [])}
        if is_leaving:
            self.leaving_s.setdefault(uid, time.monotonic())
            self.leaving_version.setdefault(uid, int(metadata["resourceVersion"]))
        if is_gone:
            self.gone_s[uid] = time.monotonic()
        if conditions.get("Ready") == "True" and not is_leaving and not is_gone:
            self.ready.add(uid)
        else:
            self.ready.discard(uid)
        if self.fewest_ready is not None:
            self.fewest_ready = min(self.fewest_ready, len(self.ready))

    def begin(self) -> None:
        """The pods that were there are known; from now on the fewest count."""
        self.fewest_ready = len(self.ready)


@contextmanager
def pod_history(deployed: Deployed) -> Iterator[PodHistory]:
    """Of the engine pods while the block runs."""
    history = PodHistory()
    label = f"prism-infer.io/deployment={deployed.name},app.kubernetes.io/component=engine"
    with watching(deployed.cluster, PODS, deployed.namespace, history.take, history.begin, label):
        yield history


def uids(deployed: Deployed) -> set[str]:
    return {pod["metadata"]["uid"] for pod in deployed.engines()}


def mark(deployed: Deployed, value: str) -> None:
    """An edit of the pod template that changes nothing of what the pods do; the image is the default one again."""
    deployed.patch({"podTemplate": {"labels": {"mark": value}}, "image": {"reference": None}})


def scale(deployed: Deployed, replicas: int) -> None:
    """As a person or an autoscaler does, on the subresource."""
    deployed.cluster.kubectl("scale", "pd", deployed.name, "-n", deployed.namespace, f"--replicas={replicas}")


def evict(deployed: Deployed, pod: Object) -> None:
    """As `kubectl drain` does, which asks again while the disruption budget has not yet counted the last pod."""
    name = pod["metadata"]["name"]
    body = client.V1Eviction(metadata=client.V1ObjectMeta(name=name, namespace=deployed.namespace))

    def is_taken() -> bool:
        try:
            client.CoreV1Api().create_namespaced_pod_eviction(name, deployed.namespace, body)
        except client.ApiException as refusal:
            if refusal.status != 429:
                raise
            return False
        return True

    eventually("the eviction", is_taken)


def is_leaving(deployed: Deployed, pod: Object) -> bool:
    """Whether that very pod is told to go, or gone."""
    uid = pod["metadata"]["uid"]
    found = [p["metadata"] for p in deployed.engines() if p["metadata"]["uid"] == uid]
    return not found or "deletionTimestamp" in found[0]


@pytest.fixture(scope="module")
def pair(cluster: Cluster, operator: str) -> Iterator[Deployed]:
    """Two engines behind two routers, Ready. Tests leave them Ready; the last one leaves one engine."""
    with new_namespace(cluster, "rollout") as namespace:
        body = prism_deployment(
            "pair",
            namespace,
            replicas=2,
            router={"replicas": 2, **AT_HOME},
            engine={"maxContextTokens": 8192},
            kv={"pages": 300},
            drain={"propagationSeconds": 5, "streamSeconds": 90},
            podTemplate={"resources": {"limits": {"cpu": "600m"}}},  # else the stream is over too soon
        )
        deployed = Deployed.apply(cluster, body)
        deployed.wait("Ready")
        yield deployed
        deployed.delete("--wait=false")


def test_a_long_stream_survives_the_rollout_of_its_pod_and_no_request_fails(pair: Deployed) -> None:
    """Nor does one fail because of the pod that is added and taken away in the middle of it."""
    before, pages = uids(pair), (invoice_pages(seed)[0] for seed in range(500, 540))
    first = pair.engines()[-1]["metadata"]  # the last by number goes first
    with pod_history(pair) as pods, steady_load(pair.url) as load:
        answer = long_answer_of(first["name"], pair.url, pages, MOST_TOKENS)
        mark(pair, "stream")
        eventually("its pod told to go", lambda: pods.leaving_s)
        answer.leave_in(STREAM_S)
        scale(pair, 3)
        eventually("a pod beside the old two", lambda: len(pods.ready - before) > 0)
        load.more()
        scale(pair, 2)
        pair.wait("Ready", timeout_s=2 * PATIENCE_S)
        load.more()
        answer.join(PATIENCE_S)
    assert answer.ended in ("left", "length"), "a fast machine may have said all"
    assert (load.failures, load.sent_away) == ([], 0)
    assert not before & uids(pair)
    assert pods.gone_s[first["uid"]] - pods.leaving_s[first["uid"]] > STREAM_S / 4, "its pod has stayed for it"
    assert pods.fewest_ready == 1


def test_an_eviction_and_three_edits_with_a_bad_image_fail_no_request_and_end_without_a_person(
    pair: Deployed, operator: str
) -> None:
    """Never below the floor of ready pods; and the operator is killed in the middle. Streams about pages end well, too,
    and those pages are found again at the new engines."""
    before = uids(pair)
    with pod_history(pair) as pods, steady_load(pair.url) as load, readers(pair.url, PAGES) as readings:
        evict(pair, pair.engines()[0])
        mark(pair, "first")
        pair.patch({"image": {"reference": ABSENT_IMAGE}})
        pair.wait("Stalled", says=ABSENT_IMAGE)
        pair.wait("Available")
        pair.wait("Ready", "False")
        mark(pair, "last")
        operators = ("-n", operator, "-l", "app.kubernetes.io/component=operator")
        pair.cluster.kubectl("delete", "pod", *operators, "--wait=false", "--grace-period=1")
        pair.wait("Ready", timeout_s=2 * PATIENCE_S)
        load.more()
    assert (load.failures, load.sent_away) == ([], 0)
    assert [reading for reading in readings if reading.problem] == []
    assert pods.fewest_ready == 1
    assert not before & uids(pair)
    homes(pair.url, PAGES)
    assert {pod["metadata"]["labels"]["mark"] for pod in pair.engines()} == {"last"}
    pair.wait("Stalled", "False")


def test_with_one_replica_the_gap_is_said_first_and_is_a_503_with_retry_after_and_a_drain_is_not_blocked(
    pair: Deployed,
) -> None:
    scale(pair, 1)
    eventually("one pod", lambda: len(pair.engines()) == 1)
    pair.wait("Ready")
    (old,) = uids(pair)
    said: list[int] = []

    def listen(kind: str, body: Object) -> None:
        metadata = body["metadata"]
        for condition in body.get("status", {}).get("conditions", []):
            is_new = condition["observedGeneration"] == metadata["generation"]
            if condition["type"] == "Progressing" and condition["reason"] == "NoSurge" and is_new:
                said.append(int(metadata["resourceVersion"]))

    watch = watching(pair.cluster, PRISM_DEPLOYMENTS, pair.namespace, listen)
    with pod_history(pair) as pods, watch, steady_load(pair.url) as load:
        mark(pair, "alone")
        pair.wait("Available", "False", reason="NoReadyPods")
        pair.wait("RouterReady")
        pair.wait("Ready")
        load.more()
    assert said[0] < pods.leaving_version[old], "versions of the API server only grow"
    assert load.failures == []
    assert load.sent_away > 0
    (only,) = pair.engines()
    evict(pair, only)
    eventually("a pod told to go", lambda: is_leaving(pair, only))
