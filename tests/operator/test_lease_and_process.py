"""The operator's process against a real API server: one leads, and what ends it ends it cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from operator_cluster import DEMO, PATIENCE_S, World, namespace_of, until

from prism_operator.api import LEASE, PRISM_DEPLOYMENT, STATEFUL_SET, Api, Kind
from prism_operator.lease import Elector
from prism_operator.options import OperatorOptions

if not os.environ.get("KUBECONFIG"):
    pytest.skip("needs a cluster: KUBECONFIG", allow_module_level=True)
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

SERVICE = Kind("v1", "Service", "services")
HEALTH_PORT, METRICS_PORT = 28081, 28080


@pytest.fixture
def world(api: Api) -> Iterator[World]:
    with namespace_of(api) as namespace:
        yield World(api, namespace, OperatorOptions(namespace=namespace, operator_namespace=namespace))


Start = Callable[[int], "subprocess.Popen[bytes]"]


@pytest.fixture
def start(world: World, tmp_path: Path) -> Iterator[Start]:
    """Starts `prism-operator` number n with short intervals, for the test's namespace alone."""
    running: list[subprocess.Popen[bytes]] = []

    def start(number: int) -> subprocess.Popen[bytes]:
        flags = {
            "namespace": world.namespace,
            "operator-namespace": world.namespace,
            "resync-s": 2,
            "lease-duration-s": 3,
            "lease-renew-deadline-s": 2,
            "lease-retry-s": 0.5,
            "eviction-retry-s": 0.5,
            "health-port": HEALTH_PORT + number,
            "metrics-port": METRICS_PORT - number,
        }
        command = [sys.executable, "-m", "prism_operator.cli", *(f"--{name}={value}" for name, value in flags.items())]
        log = (tmp_path / f"operator-{number}.log").open("wb")
        process = subprocess.Popen(command, stdout=log, stderr=log)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.wait()


def holder(world: World) -> str:
    lease = world.get(LEASE, "prism-operator")
    return str(lease["spec"].get("holderIdentity") or "") if lease else ""


def steal(world: World, identity: str) -> None:
    path = LEASE.path(world.namespace, "prism-operator")
    patch = {"spec": {"holderIdentity": identity}}
    world.api.call("PATCH", path, {"fieldManager": "thief"}, patch, "application/merge-patch+json")


def read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=PATIENCE_S) as answer:
        text: str = answer.read().decode()
        return text


def test_two_electors_never_lead_at_once(world: World) -> None:
    now = [0.0]
    first = Elector(world.api, world.options, "first", lambda: now[0])
    second = Elector(world.api, world.options, "second", lambda: now[0])
    assert (first.try_hold(), second.try_hold()) == (True, False)
    now[0] = 14.0
    assert first.try_hold()
    now[0] = 16.0
    assert not second.try_hold(), "it was renewed"
    now[0] = 31.5
    assert (second.try_hold(), first.try_hold()) == (True, False)
    second.release()
    assert first.try_hold()
    lease = world.api.get(LEASE, world.namespace, "prism-operator")
    assert lease["spec"]["leaseTransitions"] == 3


def test_a_lost_lease_is_told(world: World) -> None:
    options = OperatorOptions(operator_namespace=world.namespace, lease_retry_s=0.05)
    first = Elector(world.api, options, "first")
    assert first.try_hold()
    lost: list[str] = []
    keeper = threading.Thread(target=first.keep, args=(threading.Event(), lost.append))
    keeper.start()
    steal(world, "second")
    keeper.join(PATIENCE_S)
    assert lost == ["another operator holds it"]


def test_from_apply_to_ready_with_watches_and_a_clean_end(world: World, start: Start) -> None:
    process = start(0)
    world.put({**DEMO, "replicas": 2})
    until(lambda: world.get(STATEFUL_SET, "demo-engine"), "the workload is made")
    until(lambda: (world.run_kubelet(), world.condition("Ready").status == "True")[1], "it is ready")
    service = world.api.get(SERVICE, world.namespace, "demo")
    world.api.delete(SERVICE, world.namespace, "demo", service["metadata"]["uid"])
    until(lambda: world.get(SERVICE, "demo"), "the Service comes back")
    assert read(f"http://127.0.0.1:{HEALTH_PORT}/healthz") == "ok\n"
    metrics = f"http://127.0.0.1:{METRICS_PORT}/metrics"
    assert 'prism_operator_reconciles_total{result="ok"}' in read(metrics)
    until(lambda: 'prism_operator_watch_events_total{kind="Pod"}' in read(metrics), "a watch has told of a pod")
    metadata = world.api.get(PRISM_DEPLOYMENT, world.namespace, "demo")["metadata"]
    assert "finalizers" not in metadata
    assert "annotations" not in metadata
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) == 0
    assert holder(world) == ""


def test_a_second_operator_goes_on_where_a_killed_one_was(world: World, start: Start) -> None:
    first = start(0)
    until(lambda: holder(world), "the first leads")
    before = holder(world)
    second = start(1)
    world.put({**DEMO, "replicas": 3})
    until(lambda: (world.run_kubelet(routers=False), world.num_ready() == 3)[1], "three pods are ready")
    world.put({**DEMO, "replicas": 3, "image": {"reference": "a:1"}})
    until(lambda: "a:1" in world.images(), "the rollout has begun")
    first.kill()
    until(lambda: holder(world) not in ("", before), "the second leads")

    def is_rolled_out() -> bool:
        world.run_kubelet(routers=False)
        assert world.num_ready() >= 2
        return world.images() == ["a:1"] * 3 and world.num_ready() == 3

    until(is_rolled_out, "the second ends the rollout")
    assert second.poll() is None


def test_a_process_whose_lease_is_taken_ends_with_1(world: World, start: Start) -> None:
    process = start(0)
    until(lambda: holder(world), "it leads")
    steal(world, "somebody-else")
    assert process.wait(PATIENCE_S) == 1
