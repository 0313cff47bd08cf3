"""The API that gives an autoscaler its metric (custom.metrics.k8s.io), with values that the test sets."""

from __future__ import annotations

import json
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

from e2e.cluster.layout import NODE_ADDRESS
from e2e.harness import Cluster, Object, eventually

GROUP, VERSION = "custom.metrics.k8s.io", "v1beta2"
DISCOVERY: Object = {
    "kind": "APIResourceList",
    "apiVersion": "v1",
    "groupVersion": f"{GROUP}/{VERSION}",
    "resources": [],
}
NAME, NAMESPACE = "prism-e2e-metrics", "kube-system"


@contextmanager
def serving(cluster: Cluster, folder: Path) -> Iterator[dict[str, float]]:
    """Serves from this process, on the node's address. Yields metric name to the value that every pod has.

    `folder` takes the certificate.
    """
    values: dict[str, float] = {}
    server = ThreadingHTTPServer((NODE_ADDRESS, 0), handler(cluster, values))
    server.socket = certificate(folder).wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    cluster.apply(*objects(server.server_port))
    try:
        eventually("the metrics API", lambda: available(cluster))
        yield values
    finally:
        cluster.kubectl("delete", "apiservice", f"{VERSION}.{GROUP}")
        cluster.kubectl("delete", "service,endpointslice", "-n", NAMESPACE, NAME)
        server.shutdown()
        server.server_close()


def certificate(folder: Path) -> ssl.SSLContext:
    """Self-signed: the APIService asks for no more."""
    key, chain = folder / "metrics.key", folder / "metrics.crt"
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={NAME}"]
    subprocess.run([*request, "-keyout", key, "-out", chain], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, key)
    return context


def objects(port: int) -> list[Object]:
    """The API's registration, and a Service that leads to this process."""
    name = {"name": NAME, "namespace": NAMESPACE}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": name, "spec": {"ports": [{"port": 443}]}},
        {
            "apiVersion": "discovery.k8s.io/v1",
            "kind": "EndpointSlice",
            "metadata": {**name, "labels": {"kubernetes.io/service-name": NAME}},
            "addressType": "IPv4",
            "endpoints": [{"addresses": [NODE_ADDRESS], "conditions": {"ready": True}}],
            "ports": [{"port": port}],
        },
        {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": f"{VERSION}.{GROUP}"},
            "spec": {
                "group": GROUP,
                "version": VERSION,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
                "insecureSkipTLSVerify": True,
                "service": name,
            },
        },
    ]


def available(cluster: Cluster) -> bool:
    """As the API server sees it."""
    service = cluster.get("apiservice", f"{VERSION}.{GROUP}")
    conditions = (service or {}).get("status", {}).get("conditions", [])
    return any(c["type"] == "Available" and c["status"] == "True" for c in conditions)


def handler(cluster: Cluster, values: dict[str, float]) -> type[BaseHTTPRequestHandler]:
    """Answers discovery, and one metric of the pods that a selector names."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            # /apis/GROUP/VERSION/namespaces/NAMESPACE/pods/*/METRIC
            match unquote(url.path).strip("/").split("/")[3:]:
                case ["namespaces", namespace, "pods", "*", metric]:
                    selector = parse_qs(url.query).get("labelSelector", [""])[0]
                    self.answer(values_of(cluster, namespace, selector, metric, values.get(metric)))
                case _:
                    self.answer(DISCOVERY)

        def answer(self, body: Object) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Requests come every two seconds."""

    return Handler


def values_of(cluster: Cluster, namespace: str, selector: str, metric: str, value: float | None) -> Object:
    """The same value for each pod; none at all for a metric that the test did not set."""
    pods = cluster.list("pods", namespace, selector) if value is not None else []
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    items = [
        {
            "describedObject": {
                "kind": "Pod",
                "apiVersion": "/v1",
                "namespace": namespace,
                "name": p["metadata"]["name"],
            },
            "metric": {"name": metric},
            "timestamp": now,
            "value": f"{round(1000 * (value or 0))}m",
        }
        for p in pods
    ]
    return {"kind": "MetricValueList", "apiVersion": f"{GROUP}/{VERSION}", "metadata": {}, "items": items}
