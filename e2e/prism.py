"""Prism on the cluster under test: the operator's release, PrismDeployments, questions to them."""

from __future__ import annotations

import base64
import json
import random
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from e2e.cluster.layout import REPOSITORY
from e2e.harness import PATIENCE_S, WAIT, Cluster, Object, eventually
from prism_server.demo_model import LAYOUT_BY_NAME, draw_sample, encode_png

CHART = REPOSITORY / "charts/prism"
SYSTEM = "prism-system"
RELEASE = "prism"
RESTRICTED = {"pod-security.kubernetes.io/enforce": "restricted"}
QUICK = {
    "resyncSeconds": 2,
    "statusMinIntervalSeconds": 1,
    "evictionRetrySeconds": 1,
    "lostNodeGraceSeconds": 5,
    "lease": {"durationSeconds": 6, "renewDeadlineSeconds": 4, "retrySeconds": 1},
}
"""The operator's intervals in tests: chart values under `operator`."""
CHILD_KINDS = (
    "statefulsets,deployments,services,configmaps,serviceaccounts,roles,rolebindings,poddisruptionbudgets,"
    "networkpolicies,secrets,jobs,persistentvolumeclaims,horizontalpodautoscalers"
)


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Nested objects are merged, everything else of `over` goes before."""
    both = {key: merged(base[key], value) for key, value in over.items() if isinstance(value, dict) and key in base}
    return {**base, **over, **both}


def chart_values(cluster: Cluster, **more: Any) -> Object:
    """Values of the chart for this cluster: its images, short intervals."""
    images = cluster.images
    return merged({"image": {"registry": images.registry, "tag": images.tag}, "operator": QUICK}, more)


def install(cluster: Cluster, release: str, namespace: str, **values: Any) -> None:
    """Installs or upgrades a release of the chart and waits for its operator. The namespace must be there."""
    given = json.dumps(chart_values(cluster, **values))
    command = ["upgrade", "--install", release, str(CHART), "-n", namespace, "-f", "-", "--wait", WAIT]
    cluster.helm(*command, stdin=given)


def make_namespace(cluster: Cluster, name: str) -> None:
    """Under the strictest Pod Security, ready for pods."""
    cluster.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}})
    eventually("its service account", lambda: cluster.get("serviceaccount", "default", name))


@contextmanager
def new_namespace(cluster: Cluster, prefix: str) -> Iterator[str]:
    """As the fixture `namespace`, for fixtures that outlive a test."""
    name = f"{prefix}-{secrets.token_hex(4)}"
    make_namespace(cluster, name)
    try:
        yield name
    finally:
        cluster.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


def demo_spec(**changes: Any) -> Object:
    """`spec` of the bundled model on one CPU thread behind one router, with a short drain; `changes` are merged in."""
    spec = {
        "model": {"source": {"demo": {}}, "servedName": "demo"},
        "engine": {
            "device": "cpu",
            "maxContextTokens": 4096,
            "maxRunningSequences": 8,
            "requestTimeoutSeconds": 90,
            "overrides": {"model": {"threads": 1}, "media": {"workers": 1}},
        },
        "router": {"replicas": 1},
        "kv": {"dtype": "bf16", "pages": 128},
        "media": {"cacheSize": "32Mi"},
        "drain": {"propagationSeconds": 1, "streamSeconds": 90},
        "startup": {"timeoutSeconds": 240},
        "podTemplate": {"resources": {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"memory": "2Gi"}}},
    }
    return merged(spec, changes)


def prism_deployment(name: str, namespace: str, **changes: Any) -> Object:
    """A PrismDeployment of `demo_spec`. To change the source, give `model={"source": {"demo": None, ...}}`."""
    spec = without_none(demo_spec(**changes))
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "prism-infer.io/v1alpha1", "kind": "PrismDeployment", "metadata": metadata, "spec": spec}


def without_none(value: Any) -> Any:
    """Objects without their fields that are None."""
    if isinstance(value, dict):
        return {key: without_none(inner) for key, inner in value.items() if inner is not None}
    return value


@dataclass(frozen=True)
class Deployed:
    """A PrismDeployment in the cluster."""

    cluster: Cluster
    name: str
    namespace: str

    @classmethod
    def apply(cls, cluster: Cluster, body: Object) -> Deployed:
        """Applies it as a person does; returns at once."""
        cluster.apply(body)
        return cls(cluster, body["metadata"]["name"], body["metadata"]["namespace"])

    def read(self) -> Object:
        """As the API server has it."""
        return self.cluster.read("prismdeployment", self.name, self.namespace)

    @property
    def status(self) -> Object:
        """Empty until the operator has seen it."""
        status: Object = self.read().get("status", {})
        return status

    def condition(self, kind: str) -> Object:
        """One condition of the status. It must be there, and about the spec as it is now."""
        body = self.read()
        conditions: dict[str, Object] = {c["type"]: c for c in body.get("status", {}).get("conditions", [])}
        assert kind in conditions, "the condition is not there yet"
        assert conditions[kind]["observedGeneration"] == body["metadata"]["generation"], "it is about an older spec"
        return conditions[kind]

    def wait(
        self, kind: str, status: str = "True", reason: str = "", says: str = "", timeout_s: float = PATIENCE_S
    ) -> Object:
        """Until the condition is so about the spec as it is now; with that reason, and a message with those words."""

        def check() -> Object:
            found = self.condition(kind)
            is_so = found["status"] == status and reason in ("", found["reason"]) and says in found["message"]
            assert is_so, f"{found['status']} {found['reason']}: {found['message']}"
            return found

        return eventually(f"{self.name}: {kind}={status} {reason} {says}", check, timeout_s)

    def patch(self, spec: Object) -> None:
        """A merge patch of the spec, as `kubectl edit` makes it."""
        patch = json.dumps({"spec": spec})
        self.cluster.kubectl("patch", "pd", self.name, "-n", self.namespace, "--type=merge", "-p", patch)

    def engines(self) -> list[Object]:
        """Its engine pods, terminating ones included, by name."""
        return self._pods("engine")

    def routers(self) -> list[Object]:
        """Its router pods, terminating ones included, by name."""
        return self._pods("router")

    def _pods(self, component: str) -> list[Object]:
        label = f"prism-infer.io/deployment={self.name},app.kubernetes.io/component={component}"
        return sorted(self.cluster.list("pods", self.namespace, label), key=lambda pod: str(pod["metadata"]["name"]))

    @property
    def url(self) -> str:
        """Of its Service, by address: tests run where Services are reachable but the cluster's names are not known."""
        service = eventually("its Service", lambda: self.cluster.get("service", self.name, self.namespace))
        return f"http://{service['spec']['clusterIP']}:{service['spec']['ports'][0]['port']}"

    def delete(self, *flags: str) -> None:
        """Its children go with it."""
        self.cluster.kubectl("delete", "pd", self.name, "-n", self.namespace, "--ignore-not-found", *flags)


def children(cluster: Cluster, deployed: Deployed) -> list[Object]:
    """All that belongs to it, pods included."""
    label = f"prism-infer.io/deployment={deployed.name}"
    return [child for kinds in (CHILD_KINDS, "pods") for child in cluster.list(kinds, deployed.namespace, label)]


@dataclass(frozen=True)
class Page:
    """An invoice page as PNG, a question about it and what is right."""

    png: bytes
    question: str
    answer: str


def invoice_pages(seed: int) -> list[Page]:
    """Questions, each about the same page; other seeds draw other pages."""
    sample = draw_sample(random.Random(seed), LAYOUT_BY_NAME["page-256x320"])
    png = encode_png(sample.pictures[0])
    return [Page(png, turn.question, turn.answer) for turn in sample.turns]


def chat(question: str, *pngs: bytes, **options: Any) -> Object:
    """Body of a request for a chat completion, greedy unless `options` say otherwise."""
    pictures = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}}
        for png in pngs
    ]
    content = [*pictures, {"type": "text", "text": question}]
    return {"model": "demo", "messages": [{"role": "user", "content": content}], "temperature": 0, **options}


def headers(key: str | None) -> dict[str, str]:
    """With an API key, if there is one."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def ask(url: str, body: Object, key: str | None = None, timeout_s: float = 60) -> httpx.Response:
    """One request on a connection of its own, so that the Service picks a pod each time. No status raises."""
    return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers(key), timeout=timeout_s)


def events_of(url: str, body: Object, take_head: Callable[[httpx.Headers], None] | None = None) -> Iterator[Object]:
    """The events of a streamed answer, as they come; before the first, `take_head` gets the answer's headers.

    Raises httpx.HTTPError for any other status, and for a minute's silence.
    """
    body = body | {"stream": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as response:
        response.raise_for_status()
        if take_head is not None:
            take_head(response.headers)
        for line in response.iter_lines():
            if line.startswith("data: ") and line != "data: [DONE]":
                yield json.loads(line.removeprefix("data: "))


def text_of(answer: httpx.Response) -> str:
    """What the model said. Fails with the server's words for any status but 200."""
    assert answer.status_code == 200, f"{answer.status_code}: {answer.text}"
    said: str = answer.json()["choices"][0]["message"]["content"]
    return said


@pytest.fixture(scope="session")
def operator(cluster: Cluster) -> Iterator[str]:
    """The release `prism` in `prism-system`, for the whole cluster. Its namespace.

    One that was there before the tests is brought to these values and left there after them.
    """
    make_namespace(cluster, SYSTEM)
    releases = json.loads(cluster.helm("list", "-n", SYSTEM, "-o", "json"))
    was_there = RELEASE in [release["name"] for release in releases]
    install(cluster, RELEASE, SYSTEM)
    yield SYSTEM
    if not was_there:
        cluster.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait")


@pytest.fixture(scope="session")
def demo(cluster: Cluster, operator: str) -> Iterator[Deployed]:
    """The bundled model behind its Service, one engine, Ready and measured. Tests leave its spec alone."""
    with new_namespace(cluster, "demo") as namespace:
        deployed = Deployed.apply(cluster, prism_deployment("demo", namespace))
        deployed.wait("Ready")
        deployed.wait("KVPlanMatched", reason="Matched")
        yield deployed
        deployed.delete("--wait=false")
