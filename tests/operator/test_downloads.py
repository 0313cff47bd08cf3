"""Downloads against a real API server with its controllers; the test plays the kubelet, the loader's too."""

from __future__ import annotations

import os
from typing import Any

import pytest
from operator_cluster import DEMO, World, is_held_by_scheduler, until

from prism_operator.api import POD, STATEFUL_SET, Object

if not os.environ.get("KUBECONFIG"):
    pytest.skip("needs a cluster: KUBECONFIG", allow_module_level=True)
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

ENGINE = "demo-engine"


def spec(**changes: Any) -> dict[str, Any]:
    return {**DEMO, "replicas": 2, **changes}


def loaders(world: World) -> list[Object]:
    """Their pods, once the scheduler has said of each that no node takes it: what the test says comes after that."""
    pods = world.api.list(POD, world.namespace, "app.kubernetes.io/component=loader")
    return [pod for pod in pods if is_held_by_scheduler(pod)]


def test_a_failed_download_shows_with_the_loaders_own_words(world: World) -> None:
    hub = {"source": {"huggingFace": {"repository": "a/b"}}, "shape": "demo"}
    world.put(spec(model=hub))
    world.step()
    assert world.condition("ModelReady").reason == "Downloading"
    (pod,) = until(lambda: loaders(world), "the loader's pod")
    before = world.versions()
    container = pod["spec"]["containers"][0]
    ended = {"exitCode": 3, "reason": "Error", "message": "Unauthorized: the hub says 401 for a/b"}
    status = {
        "phase": "Running",
        "conditions": [{"type": "Ready", "status": "False"}],
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "restartCount": 1,
                "ready": False,
                "state": {"waiting": {"reason": "CrashLoopBackOff"}},
                "lastState": {"terminated": ended},
            }
        ],
    }
    world.patch_status(POD, pod["metadata"]["name"], status)
    world.step()
    found = world.condition("ModelReady")
    assert (found.status, found.reason, found.message) == ("False", "Unauthorized", "the hub says 401 for a/b")
    assert world.versions()["Job", pod["metadata"]["labels"]["batch.kubernetes.io/job-name"]] is not None
    assert before.keys() == world.versions().keys()


def end_download(world: World) -> None:
    """As a kubelet whose loader has come to its end; the Job's controller does the rest."""
    ended = {"exitCode": 0, "reason": "Completed", "startedAt": None, "finishedAt": None}
    state = {"name": "loader", "image": "", "imageID": "", "restartCount": 0, "ready": False}
    status = {"phase": "Succeeded", "containerStatuses": [{**state, "state": {"terminated": ended}}]}

    def is_there() -> bool:
        for pod in loaders(world):
            if pod["status"]["phase"] != "Succeeded":
                world.patch_status(POD, pod["metadata"]["name"], status)
        world.step()
        return world.condition("ModelReady").reason == "Downloaded"

    until(is_there, "the model is there")


def test_engines_come_after_the_download_and_serve_on_during_the_next(world: World) -> None:
    def hub(revision: str) -> dict[str, Any]:
        return {"source": {"huggingFace": {"repository": "a/b", "revision": revision}}, "shape": "demo"}

    def serves() -> bool:
        world.run_kubelet()
        world.step()
        return world.condition("Ready").status == "True"

    world.put(spec(model=hub("v1")))
    for _ in range(3):
        world.step()
    assert world.get(STATEFUL_SET, ENGINE) is None
    assert world.condition("Ready").reason == world.condition("Progressing").reason == "AwaitingModel"
    end_download(world)
    until(serves, "the first revision serves")

    old = world.api.get(STATEFUL_SET, world.namespace, ENGINE)
    world.put(spec(model=hub("v2"), replicas=3))
    until(lambda: (world.step(), world.condition("ModelReady").status == "False")[1], "the next download")
    assert world.condition("Ready").reason == "AwaitingModel"
    during = world.api.get(STATEFUL_SET, world.namespace, ENGINE)
    assert during["spec"] == {**old["spec"], "replicas": 3}
    until(lambda: (world.run_kubelet(), world.step(), world.num_ready() == 3)[2], "it scales all the same")
    assert {pod.revision for pod in world.pods() if pod.revision} == {during["status"]["updateRevision"]}
    before = world.api.get(STATEFUL_SET, world.namespace, ENGINE)
    world.step()
    after = world.api.get(STATEFUL_SET, world.namespace, ENGINE)
    assert after["metadata"]["generation"] == before["metadata"]["generation"]
    assert world.condition("Available").status == "True"

    end_download(world)
    until(serves, "the second revision serves")
    after = world.api.get(STATEFUL_SET, world.namespace, ENGINE)
    assert after["status"]["updateRevision"] != during["status"]["updateRevision"]
    assert all(pod.revision == after["status"]["updateRevision"] for pod in world.pods() if pod.revision)
