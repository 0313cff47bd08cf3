"""kube-router as the NetworkPolicy engine: a bridge alone enforces none."""

from __future__ import annotations

from e2e.cluster.layout import NODE, SERVICE_NETWORK, Layout, Program


def program(layout: Layout) -> Program:
    """Only its firewall. A new pod's address takes about a second to reach the rules: clients must retry."""
    return Program.of(
        "kube-router",
        "--run-firewall=true",
        "--run-router=false",
        "--run-service-proxy=false",
        "--run-loadbalancer=false",
        f"--kubeconfig={layout.kubeconfig('policy')}",
        f"--hostname-override={NODE}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        "--health-port=20244",
        "--metrics-port=0",
    )
