"""Who reaches what, and what a pod may do: NetworkPolicies and Pod Security, in force."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import httpx
import pytest

from e2e.harness import WAIT, Cluster, CommandFailed, eventually, pod
from e2e.prism import RESTRICTED, SYSTEM, Deployed, new_namespace

API, ADMIN = 8000, 9000
CONNECT = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=2).close()
    print("open")
except OSError as error:
    print("shut")
"""


@dataclass(frozen=True)
class Inside:
    """A container to look around from."""

    cluster: Cluster
    namespace: str
    pod: str

    def run(self, *command: str) -> str:
        """What the command printed, whatever its exit status."""
        line = 'out=$("$@" 2>&1); echo "$out"; true'
        return self.cluster.kubectl(
            "exec", "-n", self.namespace, self.pod, "--", "sh", "-c", line, "sh", *command
        ).strip()

    def reaches(self, host: str, port: int) -> bool:
        """Whether a connection is taken within two seconds."""
        said = self.run("python3", "-c", CONNECT, host, str(port))
        assert said in ("open", "shut"), said
        return said == "open"


@pytest.fixture(scope="module")
def engine(cluster: Cluster, demo: Deployed) -> Inside:
    """Of the demo."""
    return Inside(cluster, demo.namespace, demo.engines()[0]["metadata"]["name"])


@pytest.fixture(scope="module")
def address(demo: Deployed) -> str:
    """Of the demo's engine."""
    return str(demo.engines()[0]["status"]["podIP"])


@pytest.fixture(scope="module")
def router(cluster: Cluster, demo: Deployed) -> Inside:
    """Of the demo."""
    return Inside(cluster, demo.namespace, demo.routers()[0]["metadata"]["name"])


@pytest.fixture(scope="module")
def router_address(demo: Deployed) -> str:
    """Of the demo's router."""
    return str(demo.routers()[0]["status"]["podIP"])


@pytest.fixture(scope="module")
def strangers(cluster: Cluster, demo: Deployed) -> Iterator[list[Inside]]:
    """A pod beside the demo, and one in another namespace."""
    with new_namespace(cluster, "elsewhere") as elsewhere:
        found = [Inside(cluster, namespace, "stranger") for namespace in (demo.namespace, elsewhere)]
        for stranger in found:
            cluster.apply(pod("stranger", stranger.namespace, cluster.images.base, "sleep", "600"))
        for stranger in found:
            cluster.kubectl("wait", "pod/stranger", "--for=condition=Ready", WAIT, "-n", stranger.namespace)
        yield found
        cluster.kubectl("delete", "pod", "stranger", "-n", demo.namespace, "--wait=false")


def test_other_pods_reach_the_routers_api_and_nothing_else(
    strangers: list[Inside], address: str, router_address: str
) -> None:
    for listener in (address, router_address):
        assert httpx.get(f"http://{listener}:{ADMIN}/metrics").status_code == 200, "the node itself may: it listens"
    for stranger in strangers:
        eventually("the api", partial(stranger.reaches, router_address, API))
        assert not stranger.reaches(router_address, ADMIN)
        assert not stranger.reaches(address, API), "past the router"
        assert not stranger.reaches(address, ADMIN)


def test_a_router_reaches_engines_and_the_api_server_and_nobody_else(
    cluster: Cluster, router: Inside, address: str
) -> None:
    for host, port in ((address, API), (address, ADMIN), ("kubernetes.default.svc", 443)):
        eventually(f"{host}:{port}", partial(router.reaches, host, port))
    (operator, *_) = cluster.list("pods", SYSTEM, "app.kubernetes.io/component=operator")
    assert not router.reaches(operator["status"]["podIP"], 8080), "which is open to others"


def test_a_routers_token_is_for_endpoint_slices_of_its_namespace_alone(cluster: Cluster, demo: Deployed) -> None:
    account = f"--as=system:serviceaccount:{demo.namespace}:{demo.name}-router"

    def may(verb: str, kind: str, namespace: str) -> bool:
        try:
            return cluster.kubectl("auth", "can-i", verb, kind, account, "-n", namespace).strip() == "yes"
        except CommandFailed as refusal:
            if refusal.message != "no":
                raise
            return False

    assert may("watch", "endpointslices.discovery.k8s.io", demo.namespace)
    for verb, kind, namespace in (
        ("watch", "endpointslices.discovery.k8s.io", "default"),
        ("update", "endpointslices.discovery.k8s.io", demo.namespace),
        ("get", "secrets", demo.namespace),
        ("list", "pods", demo.namespace),
    ):
        assert not may(verb, kind, namespace), f"{verb} {kind}"


def test_internal_paths_ask_for_the_token_that_the_operator_has(
    demo: Deployed, address: str, router_address: str
) -> None:
    assert httpx.get(f"http://{router_address}:{ADMIN}/internal/pods").status_code == 401
    for path in ("/internal/capacity", "/internal/cache"):
        assert httpx.get(f"http://{address}:{ADMIN}{path}").status_code == 401
        assert httpx.get(f"{demo.url}{path}").status_code == 404, "not on the api listener at all"
    assert demo.status["measuredPages"] == demo.read()["spec"]["kv"]["pages"], "what the operator read there"
    assert demo.condition("KVPlanMatched")["reason"] == "Matched"


def test_an_engine_reaches_names_and_nothing_else(cluster: Cluster, engine: Inside) -> None:
    named = engine.run("python3", "-c", "import socket; print(socket.gethostbyname('kubernetes.default.svc'))")
    assert named == cluster.read("service", "kubernetes", "default")["spec"]["clusterIP"]
    assert not engine.reaches("kubernetes.default.svc", 443)


def test_an_engine_holds_no_token_of_the_api_server(engine: Inside) -> None:
    assert "No such file" in engine.run("ls", "/var/run/secrets/kubernetes.io/serviceaccount")


def test_engine_and_router_run_under_the_strictest_pod_security(
    cluster: Cluster, demo: Deployed, engine: Inside, router: Inside
) -> None:
    assert cluster.read("namespace", demo.namespace)["metadata"]["labels"].items() >= RESTRICTED.items()
    assert engine.run("touch", "/tmp/x", "/cache/x", "/home/prism/x") == ""
    for inside in (engine, router):
        assert inside.run("id", "-u") == "65532"
        assert "Read-only file system" in inside.run("touch", "/opt/prism/x")
        status = inside.run("grep", "Cap", "/proc/self/status").splitlines()
        assert {int(line.split(":")[1], 16) for line in status} == {0}


def test_the_operator_is_reached_for_its_metrics_alone(cluster: Cluster, strangers: list[Inside]) -> None:
    label = "app.kubernetes.io/component=operator"
    for stranger in strangers:
        for running in cluster.list("pods", SYSTEM, label):
            address = running["status"]["podIP"]
            eventually("metrics", partial(stranger.reaches, address, 8080))
            assert not stranger.reaches(address, 8081)
