"""The release that brought the definition goes, another comes, and the definition itself is deleted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2e.harness import WAIT, Cluster, eventually
from e2e.prism import (
    RELEASE,
    SYSTEM,
    Deployed,
    ask,
    chat,
    children,
    install,
    new_namespace,
    prism_deployment,
    text_of,
)

CRD = "prismdeployments.prism-infer.io"


@pytest.fixture
def restored(cluster: Cluster, demo: Deployed) -> Iterator[Deployed]:
    """The demo; after the test, the session's release and its demo are as they were."""
    yield demo
    install(cluster, RELEASE, SYSTEM)
    cluster.apply(prism_deployment(demo.name, demo.namespace))
    demo.wait("Ready")


def test_another_release_takes_over_and_without_the_definition_nothing_is_left(
    cluster: Cluster, restored: Deployed
) -> None:
    demo, uids = restored, [pod["metadata"]["uid"] for pod in restored.engines()]
    cluster.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait")
    assert cluster.get("crd", CRD) is not None
    with new_namespace(cluster, "successor") as namespace:
        install(cluster, "successor", namespace)
        before = demo.read()["metadata"]["generation"]
        demo.patch({"service": {"annotations": {"example.com/successor": "yes"}}})
        eventually("a pass of the successor", lambda: demo.status["observedGeneration"] > before)
        demo.wait("Ready")
        eventually(
            "the pages, read with the successor's token", lambda: demo.condition("KVPlanMatched")["status"] == "True"
        )
        assert [pod["metadata"]["uid"] for pod in demo.engines()] == uids
        assert text_of(ask(demo.url, chat("Hello", max_tokens=4)))

        cluster.kubectl("delete", "crd", CRD, WAIT)
        eventually("no child is left", lambda: children(cluster, demo) == [])
        cluster.helm("uninstall", "successor", "-n", namespace, "--wait")
