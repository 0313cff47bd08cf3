"""What the operator knows of routers: their Deployment, and what they say of engines over HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from prism_operator.admin_client import RouterView, read_router_views
from prism_operator.pods import Pod, Trouble
from prism_operator.routers import Routers, RouterViews, routers_of
from prism_server.router.admin import pods_known
from prism_server.router.discovery_static import StaticDiscovery
from prism_server.router.endpoints import Endpoint
from prism_server.router.services import Services
from prism_server.router.settings import DiscoverySettings, RouterSettings
from prism_server.router.upstream import Origin

TOKEN = "t0ken"


def engine(number: int, *, is_ready: bool = True) -> Pod:
    return Pod(f"e-{number}", f"u{number}", "r1", number, is_ready=is_ready)


def router(name: str, *, is_ready: bool = True) -> Pod:
    return Pod(name, name, "", -1, is_ready=is_ready, ip="127.0.0.1")


def entry(uid: str, **fields: Any) -> dict[str, Any]:
    return {"uid": uid, "is_ready": True, "is_answering": True, "is_terminating": False, **fields}


class Admin(BaseHTTPRequestHandler):
    """The admin listener of a router that knows five pods and serves through one."""

    def do_GET(self) -> None:
        is_known = self.path == "/internal/pods" and self.headers["Authorization"] == f"Bearer {TOKEN}"
        pods = [
            entry("u0"),
            entry("u1", is_ready=False),
            entry("u2", is_ready=None),
            entry("u3", is_answering=False),
            entry("u4", is_terminating=True),
        ]
        content = json.dumps({"phase": "ready", "pods": pods}).encode()
        self.send_response(200 if is_known else 401)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Silent."""


@pytest.fixture
def port(patient_reads: None) -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Admin)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def test_an_engine_counts_as_known_when_the_router_sends_requests_to_it(port: int) -> None:
    assert read_router_views([router("a")], TOKEN, port) == [RouterView("a", frozenset({"u0"}))]
    assert read_router_views([router("a")], "wrong", port) == []


def test_a_real_routers_answer_has_what_the_operator_reads() -> None:
    async def answer() -> dict[str, Any]:
        settings = RouterSettings(discovery=DiscoverySettings(backends="http://engine"))
        services = Services(settings, StaticDiscovery(()))
        origin = Origin("127.0.0.1", 9)
        services.members.take([Endpoint("e-0", "u0", is_terminating=True, api=origin, admin=origin)])
        try:
            return pods_known(services)
        finally:
            services.close()

    (known,) = asyncio.run(answer())["pods"]
    assert entry("u0", is_answering=False, is_terminating=True).items() <= known.items()


class Fleet:
    """Routers that hear of engines when the test says so."""

    def __init__(self) -> None:
        self.known: dict[str, set[str]] = {}
        self.asked: list[list[str]] = []

    def read(self, routers: Sequence[Pod]) -> list[RouterView]:
        self.asked.append([pod.name for pod in routers])
        return [RouterView(pod.uid, frozenset(self.known[pod.uid])) for pod in routers if pod.uid in self.known]


def test_routers_are_asked_until_they_know_every_ready_engine_and_then_no_more() -> None:
    fleet = Fleet()
    views = RouterViews(fleet.read, retry_s=0.5)
    routers, engines = [router("a"), router("b")], [engine(0), engine(1, is_ready=False)]
    fleet.known = {"a": {"u0"}, "b": set()}
    assert views.of(routers, engines) == {"a": {"u0"}, "b": set()}
    assert (fleet.asked, views.retry_s) == ([["a", "b"]], 0.5)
    fleet.known["b"] = {"u0"}
    assert views.of(routers, engines) == {"a": {"u0"}, "b": {"u0"}}
    assert (fleet.asked[1:], views.retry_s) == ([["b"]], None)
    views.of(routers, engines)
    assert len(fleet.asked) == 2, "no news, no question"
    views.of(routers, [engine(0), engine(1)])
    assert fleet.asked[2:] == [["a", "b"]]


def test_a_router_that_does_not_answer_takes_nothing_back_and_is_asked_with_growing_pauses() -> None:
    fleet = Fleet()
    views = RouterViews(fleet.read, retry_s=0.5)
    fleet.known = {"a": {"u0"}}
    assert views.of([router("a"), router("b")], [engine(0)]) == {"a": {"u0"}}
    fleet.known = {}
    pauses = []
    for _ in range(10):
        assert views.of([router("a"), router("b")], [engine(0)]) == {"a": {"u0"}}
        pauses.append(views.retry_s)
    assert pauses[:3] == [1.0, 2.0, 4.0]
    assert pauses[-1] == 60.0


def test_what_a_router_said_ends_with_the_readiness_of_either() -> None:
    fleet = Fleet()
    views = RouterViews(fleet.read, retry_s=0.5)
    fleet.known = {"a": {"u0"}}
    views.of([router("a")], [engine(0)])
    assert views.of([router("a")], [engine(0, is_ready=False)]) == {"a": set()}
    fleet.known = {"a": set()}
    assert views.of([router("a")], [engine(0)]) == {"a": set()}, "the same pod, ready again"
    fleet.known = {"a": {"u0"}}
    views.of([router("a")], [engine(0)])
    assert views.of([router("a", is_ready=False)], [engine(0)]) == {}


def test_the_first_router_that_lacks_an_engine_is_named() -> None:
    pods = [router("a"), router("b"), router("c", is_ready=False)]
    both = {"a": frozenset({"u0"}), "b": frozenset({"u0"})}
    engines = [engine(0), engine(1, is_ready=False)]
    assert Routers(2, True, pods, both).unrouted(engines) == {}
    behind = Routers(2, True, pods, both | {"b": frozenset()})
    assert behind.unrouted(engines) == {"u0": "router b does not know e-0 yet"}
    assert behind.silent == ""


def test_a_router_that_never_answered_is_silent_and_lacks_nothing() -> None:
    pods = [router("a"), router("b"), router("c", is_ready=False)]
    silent = Routers(2, True, pods, {"a": frozenset({"u0"})})
    assert silent.silent == "router b does not answer the operator"
    assert silent.unrouted([engine(0)]) == {}
    assert Routers(2, True, pods[2:]).silent == "", "nobody is asked where nobody is served"


@pytest.mark.parametrize(
    ("status", "is_rolled_out"),
    [
        ({"replicas": 2, "updatedReplicas": 2, "availableReplicas": 2, "observedGeneration": 3}, True),
        ({"replicas": 2, "updatedReplicas": 2, "availableReplicas": 2, "observedGeneration": 2}, False),
        ({"replicas": 3, "updatedReplicas": 2, "availableReplicas": 2, "observedGeneration": 3}, False),
        ({"replicas": 2, "updatedReplicas": 1, "availableReplicas": 2, "observedGeneration": 3}, False),
        ({"replicas": 2, "updatedReplicas": 2, "availableReplicas": 1, "observedGeneration": 3}, False),
        ({}, False),
    ],
)
def test_routers_are_rolled_out_when_all_are_new_and_available(status: dict[str, int], is_rolled_out: bool) -> None:
    body = {"metadata": {"generation": 3}, "spec": {"replicas": 2}, "status": status}
    found = routers_of(body, [], None)
    assert (found.replicas, found.is_rolled_out) == (2, is_rolled_out)
    assert routers_of(None, (), None) == Routers()


def test_pods_that_may_not_be_made_are_told_of_by_their_deployment() -> None:
    refusal = {"type": "ReplicaFailure", "status": "True", "reason": "FailedCreate", "message": "exceeded quota"}
    body: dict[str, Any] = {"metadata": {}, "spec": {"replicas": 2}, "status": {"conditions": [refusal]}}
    assert routers_of(body, [], None).refusal == Trouble("FailedCreate", "exceeded quota")
    body["status"]["conditions"] = [refusal | {"status": "False"}]
    assert routers_of(body, [], None).refusal is None


def test_a_router_that_has_ended_for_good_is_told_of_only_while_one_is_missing() -> None:
    """A ReplicaSet makes another one in its place and leaves what has ended, such as an evicted pod, where it is."""
    body = {"metadata": {}, "spec": {"replicas": 2}}
    evicted = replace(router("a", is_ready=False), is_finished=True, trouble=Trouble("Evicted", "the node ran out"))
    both = [router("b"), router("c")]
    assert routers_of(body, [evicted, *both], None).pods == both
    missing = [evicted, router("b"), router("c", is_ready=False)]
    assert routers_of(body, missing, None).pods == missing
