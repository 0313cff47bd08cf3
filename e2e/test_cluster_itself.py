"""What the other tests rely on, seen on the cluster itself: a failure here explains theirs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from e2e.cluster.layout import NODE, REPOSITORY
from e2e.harness import WAIT, Cluster, CommandFailed, Object, eventually, pod

CRD_FILE = REPOSITORY / "charts/prism/files/crd.yaml"
CRD = "prismdeployments.prism-infer.io"
SHUT_OUT = {"TimeoutError", "ConnectionRefusedError"}
"""Policy engines drop or refuse."""
SERVER = ("python3", "-m", "http.server", "8000", "--directory", "/etc/apt")


@pytest.fixture
def web(cluster: Cluster, namespace: str) -> str:
    """A server behind a Service named `web`, ready. Its namespace."""
    probe = {"readinessProbe": {"httpGet": {"port": 8000}, "periodSeconds": 1}}
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": namespace},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8000}]},
    }
    cluster.apply(pod("web", namespace, cluster.images.base, *SERVER, container=probe), service)
    cluster.kubectl("wait", "-n", namespace, "--for=condition=Ready", "pod/web", WAIT)
    return namespace


def fetch_from(cluster: Cluster, namespace: str, name: str) -> str:
    """What a request through the Service gives in that pod: the status, or the name of the error."""
    code = (
        "import urllib.request as r\n"
        "try: print(r.urlopen('http://web', timeout=2).status)\n"
        "except OSError as e: print(type(getattr(e, 'reason', e)).__name__)"
    )
    return cluster.kubectl("exec", "-n", namespace, name, "--", "python3", "-c", code).strip()


def start_client(cluster: Cluster, namespace: str, name: str) -> None:
    """A pod to send requests from."""
    cluster.apply(pod(name, namespace, cluster.images.base, "sleep", "600"))
    cluster.kubectl("wait", "-n", namespace, "--for=condition=Ready", f"pod/{name}", WAIT)


def test_a_node_is_ready_and_its_kubernetes_is_new_enough(cluster: Cluster) -> None:
    nodes = json.loads(cluster.kubectl("get", "nodes", "-o", "json"))["items"]
    conditions = {c["type"]: c["status"] for node in nodes for c in node["status"]["conditions"]}
    assert conditions["Ready"] == "True"
    version = json.loads(cluster.kubectl("version", "-o", "json"))["serverVersion"]
    assert (int(version["major"]), int(version["minor"].rstrip("+"))) >= (1, 31)


def test_a_pod_pulls_from_the_registry_and_its_log_can_be_read(cluster: Cluster, namespace: str) -> None:
    always = {"imagePullPolicy": "Always"}
    cluster.apply(pod("hello", namespace, cluster.images.base, "python3", "-c", "print(6 * 7)", container=always))
    eventually("the pod's end", lambda: phase(cluster, namespace, "hello") == "Succeeded")
    assert cluster.kubectl("logs", "-n", namespace, "hello") == "42\n"


def test_a_service_answers_by_name_from_a_pod(cluster: Cluster, web: str) -> None:
    start_client(cluster, web, "client")
    eventually("an answer", lambda: fetch_from(cluster, web, "client") == "200")


def test_a_network_policy_shuts_out_and_lets_in_by_label(cluster: Cluster, web: str) -> None:
    start_client(cluster, web, "friend")
    start_client(cluster, web, "stranger")
    eventually("an answer to the friend", lambda: fetch_from(cluster, web, "friend") == "200")
    eventually("an answer to the stranger", lambda: fetch_from(cluster, web, "stranger") == "200")
    friends = {"podSelector": {"matchLabels": {"app": "friend"}}}
    policy: Object = {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "friends-only", "namespace": web},
        "spec": {"podSelector": {"matchLabels": {"app": "web"}}, "ingress": [{"from": [friends]}]},
    }
    cluster.apply(policy)
    eventually("the stranger shut out", lambda: fetch_from(cluster, web, "stranger") in SHUT_OUT)
    eventually("an answer to the friend", lambda: fetch_from(cluster, web, "friend") == "200")
    cluster.kubectl("delete", "networkpolicy", "-n", web, "friends-only")
    eventually("the stranger let in again", lambda: fetch_from(cluster, web, "stranger") == "200")


def test_gpus_are_handed_out_once_each(cluster: Cluster, namespace: str, two_gpus: str) -> None:
    both = {"container": {"resources": {"limits": {"nvidia.com/gpu": 2}}}}
    command = ("sh", "-c", "echo $NVIDIA_VISIBLE_DEVICES; sleep 600")
    cluster.apply(pod("first", namespace, cluster.images.base, *command, **both))
    cluster.kubectl("wait", "-n", namespace, "--for=condition=Ready", "pod/first", WAIT)
    devices = eventually("the pod's devices", lambda: cluster.kubectl("logs", "-n", namespace, "first").strip())
    assert sorted(devices.split(",")) == ["GPU-fake-0", "GPU-fake-1"]

    cluster.apply(pod("second", namespace, cluster.images.base, *command, **both))
    reason = eventually("the second pod's reason", lambda: unschedulable(cluster, namespace, "second"))
    assert "Insufficient nvidia.com/gpu" in reason
    node = cluster.get("node", two_gpus)
    assert node is not None
    assert node["metadata"]["labels"]["nvidia.com/gpu.memory"] == "81559"


def test_the_node_counts_no_gpu_without_the_plugin(cluster: Cluster, own_node: object) -> None:
    node = cluster.get("node", NODE)
    assert node is not None
    assert int(node["status"]["allocatable"].get("nvidia.com/gpu", 0)) == 0
    assert not [name for name in node["metadata"]["labels"] if name.startswith("nvidia.com/")]


def test_an_image_serves_as_a_volume(cluster: Cluster, namespace: str) -> None:
    volume = {"volumes": [{"name": "files", "image": {"reference": cluster.images.base}}]}
    mounts = {"container": {"volumeMounts": [{"name": "files", "mountPath": "/files"}]}}
    cluster.apply(pod("reader", namespace, cluster.images.base, "ls", "/files/usr/bin/python3", **volume, **mounts))
    eventually("the pod's end", lambda: phase(cluster, namespace, "reader") == "Succeeded")


def test_an_autoscaler_follows_the_metric_that_a_test_sets(
    cluster: Cluster, namespace: str, pod_metrics: dict[str, float]
) -> None:
    template = pod("work", namespace, cluster.images.base, "sleep", "600")
    template["spec"]["restartPolicy"] = "Always"
    workload: Object = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "work", "namespace": namespace},
        "spec": {
            "selector": {"matchLabels": {"app": "work"}},
            "template": {"metadata": {"labels": {"app": "work"}}, "spec": template["spec"]},
        },
    }
    target = {"type": "AverageValue", "averageValue": "100"}
    scaler: Object = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": "work", "namespace": namespace},
        "spec": {
            "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": "work"},
            "minReplicas": 1,
            "maxReplicas": 2,
            "metrics": [{"type": "Pods", "pods": {"metric": {"name": "waiting"}, "target": target}}],
            "behavior": {"scaleDown": {"stabilizationWindowSeconds": 0}},
        },
    }
    pod_metrics["waiting"] = 300
    cluster.apply(workload, scaler)
    eventually("two replicas", lambda: replicas(cluster, namespace, "work") == 2)
    pod_metrics["waiting"] = 0
    eventually("one replica", lambda: replicas(cluster, namespace, "work") == 1)


@pytest.fixture
def definition(cluster: Cluster) -> Iterator[None]:
    """The CRD, taken away after the test where the test brought it."""
    there = cluster.get("crd", CRD) is not None
    if not there:
        cluster.kubectl("apply", "--server-side", "-f", str(CRD_FILE))
        cluster.kubectl("wait", "--for=condition=Established", f"crd/{CRD}", WAIT)
    yield
    if not there:
        cluster.kubectl("delete", "crd", CRD)


@pytest.mark.usefixtures("definition")
def test_the_api_server_refuses_what_the_rules_of_the_definition_forbid(cluster: Cluster, namespace: str) -> None:
    good: Object = {
        "apiVersion": "prism-infer.io/v1alpha1",
        "kind": "PrismDeployment",
        "metadata": {"name": "pages", "namespace": namespace},
        "spec": {"model": {"source": {"demo": {}}}},
    }
    cluster.apply(good)
    bad = json.loads(json.dumps(good))
    bad["spec"]["model"]["source"]["image"] = {"reference": "registry.example.com/model:1"}
    with pytest.raises(CommandFailed, match="exactly one of demo, pvc, hostPath, image and huggingFace must be set"):
        cluster.apply(bad)


def phase(cluster: Cluster, namespace: str, name: str) -> str:
    """Of a pod."""
    found = cluster.get("pod", name, namespace)
    return str(found["status"].get("phase")) if found else "absent"


def replicas(cluster: Cluster, namespace: str, name: str) -> int:
    """That a Deployment wants."""
    found = cluster.get("deployment", name, namespace)
    assert found is not None
    return int(found["spec"]["replicas"])


def unschedulable(cluster: Cluster, namespace: str, name: str) -> str | None:
    """The scheduler's own words about a pod that it cannot place."""
    found: dict[str, Any] = cluster.get("pod", name, namespace) or {}
    for condition in found.get("status", {}).get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition["message"])
    return None
