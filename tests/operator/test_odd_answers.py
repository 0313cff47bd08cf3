"""Answers that are none: of pods, of what stands before an API server, of webhooks that are away."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from kubernetes import client

from prism_operator.admin_client import read_capacities, read_router_views, read_starts
from prism_operator.api import CONFIG_MAP, NODE, Api, ApiError, Forbidden, Object
from prism_operator.apply import apply_children
from prism_operator.pods import Pod

HERE = Pod("e-0", "u0", "r1", 0, is_ready=True, ip="127.0.0.1")
CUT_OFF = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n40\r\n{"
CONNECTIONS = 6


@contextmanager
def answering(answer: bytes) -> Iterator[int]:
    """A port where some connections, one after the other, get these very bytes."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            for _ in range(CONNECTIONS):
                try:
                    connection, _peer = server.accept()
                except OSError:
                    return  # the test is over
                with connection:
                    connection.settimeout(60)
                    connection.recv(65536)
                    connection.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]


def answer_of(status: int, content: str, kind: str = "application/json") -> bytes:
    head = f"HTTP/1.1 {status} x\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    return (head + content).encode()


@pytest.mark.usefixtures("patient_reads")
@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n", b"", CUT_OFF], ids=["another protocol", "nothing", "cut off"])
def test_a_pod_that_speaks_no_http_is_no_news(answer: bytes) -> None:
    with answering(answer) as port:
        assert read_capacities([HERE], "t", port) == []
        assert read_starts([HERE], port) == []
        assert read_router_views([HERE], "t", port) == []


def api(port: int) -> Api:
    settings = client.Configuration()
    settings.host, settings.retries = f"http://127.0.0.1:{port}", False
    return Api(client.ApiClient(settings), timeout_s=60.0)


@pytest.mark.parametrize("said", ["<html>log in first</html>", "null", "[]", '"Bad Gateway"'])
@pytest.mark.parametrize(("status", "reason"), [(200, "NoJSON"), (502, "x")])
def test_an_answer_that_is_no_object_is_an_error_of_the_api(status: int, reason: str, said: str) -> None:
    with answering(answer_of(status, said)) as port, pytest.raises(ApiError, match=re.escape(said)) as caught:
        api(port).get(CONFIG_MAP, "ns", "a")
    assert (caught.value.status, caught.value.reason) == (status, reason)


WEBHOOK = 'Internal error occurred: failed calling webhook "policies.example.org": connection refused'


def test_a_child_whose_admission_rule_cannot_be_asked_is_said_and_others_go_on() -> None:
    child = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "a", "namespace": "ns"}}
    missing = answer_of(404, json.dumps({"message": "not found"}))
    away = answer_of(500, json.dumps({"message": WEBHOOK}))
    with answering(away) as port, pytest.raises(Forbidden, match="failed calling webhook"):
        api(port).apply(CONFIG_MAP, "ns", child)

    class NoneThere(Api):
        def get(self, *_: object) -> dict[str, object]:
            with answering(missing) as port:
                return api(port).call("GET", "/")

        def apply(self, *_: object, **__: object) -> dict[str, object]:
            with answering(away) as port:
                return api(port).call("PATCH", "/")

    problems = apply_children(NoneThere(client.ApiClient()), [child, child], {}, "u", "prism")
    assert [(problem.is_conflict, problem.message) for problem in problems] == [(False, WEBHOOK)] * 2


def test_any_other_fault_of_the_server_ends_the_pass() -> None:
    away = answer_of(500, json.dumps({"message": "etcdserver: request timed out"}))
    with answering(away) as port, pytest.raises(ApiError) as caught:
        api(port).get(CONFIG_MAP, "ns", "a")
    assert type(caught.value) is ApiError


class Paged(Api):
    """Gives a list two items at a time."""

    def __init__(self, items: list[Object]) -> None:
        super().__init__(client.ApiClient())
        self.items = items
        self.asked: list[dict[str, str]] = []

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | None = None,
        content_type: str = "",
    ) -> Object:
        assert query is not None
        self.asked.append(dict(query))
        first = int(query.get("continue") or 0)
        more = str(first + 2) if first + 2 < len(self.items) else ""
        return {"metadata": {"continue": more}, "items": self.items[first : first + 2]}


def test_long_lists_come_in_pages_and_without_what_nobody_reads() -> None:
    def node(number: int) -> Object:
        ballast = {"managedFields": [{"manager": "kubelet"}]}
        return {"metadata": {"name": f"n{number}", **ballast}, "status": {"images": [{"names": ["a"]}], "phase": "x"}}

    paged = Paged([node(number) for number in range(5)])
    found = paged.list(NODE, labels="a=b")
    assert [body["metadata"] for body in found] == [{"name": f"n{number}"} for number in range(5)]
    assert {body["kind"] for body in found} == {"Node"}
    assert [body["status"] for body in found] == [{"phase": "x"}] * 5
    assert [query.get("continue", "") for query in paged.asked] == ["", "2", "4"]
    assert all(query["labelSelector"] == "a=b" and int(query["limit"]) > 0 for query in paged.asked)
