"""CoreDNS, on the node itself, behind the Service that kubelets tell to pods."""

from __future__ import annotations

from e2e.cluster.layout import DNS_ADDRESS, NODE_ADDRESS, Layout, Program

READY_URL = "http://127.0.0.1:8181/ready"
PORTS = [{"name": "dns", "port": 53, "protocol": "UDP"}, {"name": "dns-tcp", "port": 53, "protocol": "TCP"}]


def write_files(layout: Layout) -> None:
    """Names of Services live five seconds in caches. `resolv.conf` is for processes on the node, such as the tests."""
    (layout.run / "Corefile").write_text(
        f"""\
.:53 {{
  errors
  ready 127.0.0.1:8181
  kubernetes cluster.local in-addr.arpa {{
    kubeconfig {layout.kubeconfig("dns")}
    pods insecure
    ttl 5
  }}
  cache 5
}}
"""
    )
    (layout.run / "resolv.conf").write_text(f"nameserver {DNS_ADDRESS}\nsearch svc.cluster.local cluster.local\n")


def objects() -> list[dict[str, object]]:
    """A Service without a selector, and its endpoint."""
    service: dict[str, object] = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "kube-dns", "namespace": "kube-system"},
        "spec": {"clusterIP": DNS_ADDRESS, "ports": PORTS},
    }
    endpoint: dict[str, object] = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {
            "name": "kube-dns-node",
            "namespace": "kube-system",
            "labels": {"kubernetes.io/service-name": "kube-dns"},
        },
        "addressType": "IPv4",
        "endpoints": [{"addresses": [NODE_ADDRESS], "conditions": {"ready": True}}],
        "ports": PORTS,
    }
    return [service, endpoint]


def program(layout: Layout) -> Program:
    """Answers for the cluster's names and for nothing else."""
    return Program.of("coredns", "-conf", f"{layout.run}/Corefile")
