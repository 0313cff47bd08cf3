"""The process around the passes: options, watches, and what engines tell of themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import fields
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client
from prometheus_client import generate_latest

from prism_operator import cli, handlers
from prism_operator.admin_client import Capacity, admin_token, read_capacities
from prism_operator.api import CHILD_KINDS, POD, Api
from prism_operator.deployment import class_of
from prism_operator.health import Health
from prism_operator.measures import Measures
from prism_operator.metrics import Metrics
from prism_operator.options import OperatorOptions
from prism_operator.pods import Pod
from prism_operator.queue import Key, KeyQueue
from prism_operator.slots import RolloutSlots


class Engine(BaseHTTPRequestHandler):
    """The admin listener of an engine."""

    def do_GET(self) -> None:
        is_known = self.headers["Authorization"] == f"Bearer {admin_token(b'k' * 32, 'uid')}"
        content = json.dumps({"total_pages": 12, "page_tokens": 64, "phase": "ready"}).encode()
        self.send_response(200 if is_known else 401)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def port(patient_reads: None) -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Engine)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


POD_HERE = Pod("e-0", "u0", "r1", 0, is_ready=True, ip="127.0.0.1")


def test_measured_pages_are_read_with_the_deployments_token(port: int) -> None:
    token = admin_token(b"k" * 32, "uid")
    assert read_capacities([POD_HERE], token, port) == [Capacity("e-0", "u0", 12, 64)]
    assert read_capacities([POD_HERE], token, port)[0].total_tokens == 768


def test_a_pod_that_does_not_answer_is_no_news(port: int) -> None:
    nowhere = Pod("e-1", "u1", "r1", 1, is_ready=True, ip="127.0.0.2")
    not_yet = Pod("e-2", "u2", "r1", 2)
    found = read_capacities([nowhere, POD_HERE, not_yet], admin_token(b"k" * 32, "uid"), port)
    assert [capacity.pod for capacity in found] == ["e-0"]
    assert read_capacities([POD_HERE], "wrong", port) == []


def test_pods_are_asked_when_they_are_new_and_again_with_growing_pauses_when_they_are_silent() -> None:
    now, asked, silent = [0.0], [], {"u1"}

    def read(pods: Sequence[Pod]) -> list[Capacity]:
        asked.append([pod.uid for pod in pods])
        return [Capacity(pod.name, pod.uid, 12, 64) for pod in pods if pod.uid not in silent]

    measures = Measures(read, interval_s=30.0, retry_s=5.0, clock=lambda: now[0])
    first, second = POD_HERE, Pod("e-1", "u1", "r1", 1, is_ready=True)
    assert [capacity.pod for capacity in measures.of([first])] == ["e-0"]
    now[0] = 29.0
    measures.of([first])
    assert (asked, measures.retry_s) == ([["u0"]], None)
    measures.of([first, second])
    assert (len(asked), measures.retry_s) == (2, 5.0)
    now[0] = 34.0
    measures.of([first, second])
    assert (len(asked), measures.retry_s) == (3, 10.0)
    now[0] = 43.9
    measures.of([first, second])
    silent.clear()
    now[0] = 44.0
    assert len(measures.of([first, second])) == 2
    assert (len(asked), measures.retry_s) == (4, None)


def test_slots_are_few_and_come_back() -> None:
    slots = RolloutSlots(1)
    assert (slots.take("a"), slots.take("a"), slots.take("b")) == (True, True, False)
    slots.release("a")
    assert slots.take("b")


def test_tokens_tell_deployments_and_keys_apart() -> None:
    tokens = {admin_token(key, uid) for key in (b"a" * 32, b"b" * 32) for uid in ("u1", "u2")}
    assert len(tokens) == 4


def test_every_option_is_a_flag() -> None:
    options, level = cli.parse(["--resync-s", "5", "--allow-host-path", "--operator-class=b", "--log-level", "DEBUG"])
    assert options == OperatorOptions(resync_s=5.0, allow_host_path=True, operator_class="b")
    assert level == "DEBUG"


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--lease-renew-deadline-s", "20"], "--lease-renew-deadline-s"),
        (["--resync-s", "0"], "--resync-s"),
        (["--resync-s", "soon"], "invalid float value: 'soon'"),
        (["--api-server-ports", "443;6443"], "--api-server-ports must be a list"),
        (["--api-server-ports", "0"], "--api-server-ports must be between"),
        (["--metric-port", "1"], "unknown argument '--metric-port'; did you mean --metrics-port?"),
        (["--resync", "5"], "unknown argument '--resync'; did you mean --resync-s?"),
    ],
)
def test_options_that_cannot_work_end_the_start_with_one_line(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signal.signal", lambda *_: None)
    assert cli.main(flags) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("prism-operator: error: ")
    assert said in line


def test_a_start_without_a_cluster_says_so_in_one_line(tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    command = [sys.executable, "-m", "prism_operator.cli"]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("prism-operator: error: no cluster")
    assert len(ended.stderr.splitlines()) == 1


def test_every_flag_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.parse(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    for field in fields(OperatorOptions):
        assert f"--{field.name.replace('_', '-')}" in text
        assert len(field.metadata["help"]) > 8
    assert "--resync-s SECONDS every PrismDeployment is looked at this often, whatever happens (default: 60.0)" in text


def test_writes_are_a_counter() -> None:
    metrics = Metrics()
    metrics.observe(queue=lambda: 0, resync_age_s=lambda: 0, writes=lambda: 7)
    exposed = generate_latest(metrics.registry).decode()
    assert "# TYPE prism_operator_api_writes_total counter" in exposed
    assert "prism_operator_api_writes_total 7.0" in exposed


def test_conditions_are_a_gauge_until_their_deployment_is_gone() -> None:
    metrics = Metrics()

    def said(kind: str, status: str, reason: str) -> dict[str, str]:
        return {"type": kind, "status": status, "reason": reason}

    conditions = [
        said("Available", "False", "BelowFloor"),
        said("RouterReady", "True", "RoutersServe"),
        said("KVPlanned", "Unknown", "NoFacts"),
    ]
    young = body("young")
    metrics.resynced([body("demo") | {"status": {"conditions": conditions}}, young])

    def samples() -> dict[tuple[str, str], float]:
        families = metrics.registry.collect()
        found = [
            sample for family in families for sample in family.samples if sample.name == "prism_operator_condition"
        ]
        assert all(
            (sample.labels["deployment_namespace"], sample.labels["deployment"]) == ("ns", "demo") for sample in found
        )
        return {(sample.labels["condition"], sample.labels["reason"]): sample.value for sample in found}

    assert samples() == {("Available", "BelowFloor"): 0, ("RouterReady", "RoutersServe"): 1}
    assert metrics.registry.get_sample_value("prism_operator_deployments") == 2
    metrics.resynced([young])
    assert samples() == {}


def test_the_class_of_a_deployment_that_names_none_is_the_operators_default() -> None:
    assert class_of({}) == class_of({"spec": {}}) == OperatorOptions().operator_class
    assert class_of({"spec": {"operatorClass": "b"}}) == "b"


def test_no_handler_wants_finalizers_or_annotations() -> None:
    watches = handlers.Watches(OperatorOptions(), KeyQueue(), Health(1.0), Metrics())
    registry = handlers.registry_of(Api(client.ApiClient()), watches, frozenset({"ScaledObject"}))
    assert len(registry._watching.get_all_handlers()) == len(CHILD_KINDS) - 1 + 2
    for other in (registry._changing, registry._spawning, registry._indexing, registry._webhooks):
        assert not other.get_all_handlers()


def test_every_child_is_watched_by_its_labels() -> None:
    selectors = handlers.settings_of(OperatorOptions(operator_class="b")).watching.label_selectors
    assert len(selectors) == len(CHILD_KINDS) + 1
    assert set(selectors.values()) == {"prism-infer.io/deployment,prism-infer.io/operator-class=b"}


class Keys(KeyQueue):
    """Keeps what was added, without a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.added: list[Key] = []

    def add(self, key: Key, delay_s: float = 0.0) -> None:
        self.added.append(key)


def body(name: str, spec: dict[str, Any] | None = None, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "ns", "uid": "u", "resourceVersion": "1", **metadata},
        "spec": spec or {},
    }


def test_events_lead_to_the_deployment_that_they_are_about() -> None:
    queue = Keys()
    watches = handlers.Watches(OperatorOptions(), queue, Health(1.0), Metrics())
    watches.deployment_event("ADDED", body("theirs", {"operatorClass": "theirs"}))
    assert queue.added == []
    watches.deployment_event("ADDED", body("0.strange.name"))
    owner = {"kind": "PrismDeployment", "apiVersion": "prism-infer.io/v1alpha1", "name": "demo"}
    watches.child_event("StatefulSet", body("demo-engine", ownerReferences=[owner]))
    stem = watches._by_stem
    ((_, label),) = stem
    watches.child_event(POD.kind, body("x-0", labels={"prism-infer.io/deployment": label}))
    watches.child_event(POD.kind, body("y-0", labels={"prism-infer.io/deployment": "unknown"}))
    assert queue.added == [Key("ns", "0.strange.name"), Key("ns", "demo"), Key("ns", "0.strange.name")]
