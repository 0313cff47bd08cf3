"""etcd, the API server, the controllers and the scheduler."""

from __future__ import annotations

from e2e.cluster import credentials
from e2e.cluster.layout import API_URL, NODE_ADDRESS, SERVICE_NETWORK, Layout, Program

ETCD_URL = "http://127.0.0.1:2379"
ETCD_PEER_URL = "http://127.0.0.1:2380"


def etcd(layout: Layout) -> Program:
    """Its data is this run's alone, so it need not wait for the disk."""
    return Program.of(
        "etcd",
        f"--data-dir={layout.run}/etcd",
        f"--listen-client-urls={ETCD_URL}",
        f"--advertise-client-urls={ETCD_URL}",
        f"--listen-peer-urls={ETCD_PEER_URL}",
        f"--initial-advertise-peer-urls={ETCD_PEER_URL}",
        f"--initial-cluster=default={ETCD_PEER_URL}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    )


def api_server(layout: Layout) -> Program:
    """Reaches kubelets by address: the node's name resolves nowhere."""
    key, public = credentials.service_account_keys(layout)
    return Program.of(
        "kube-apiserver",
        f"--etcd-servers={ETCD_URL}",
        f"--advertise-address={NODE_ADDRESS}",
        f"--bind-address={NODE_ADDRESS}",
        f"--cert-dir={layout.pki}",
        f"--service-cluster-ip-range={SERVICE_NETWORK}",
        f"--token-auth-file={credentials.tokens_file(layout)}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        f"--service-account-issuer={API_URL}",
        f"--service-account-key-file={public}",
        f"--service-account-signing-key-file={key}",
        "--allow-privileged=true",
        "--kubelet-preferred-address-types=InternalIP",
    )


def controllers(layout: Layout) -> Program:
    """Short HPA periods: a test waits for a scaling decision."""
    key, _ = credentials.service_account_keys(layout)
    return Program.of(
        "kube-controller-manager",
        f"--kubeconfig={layout.kubeconfig('controllers')}",
        f"--service-account-private-key-file={key}",
        f"--root-ca-file={credentials.certificate(layout)}",
        "--use-service-account-credentials",
        "--leader-elect=false",
        f"--cert-dir={layout.run}/controllers",
        "--horizontal-pod-autoscaler-sync-period=2s",
    )


def scheduler(layout: Layout) -> Program:
    """The only one, so it does not stand for election."""
    return Program.of(
        "kube-scheduler",
        f"--kubeconfig={layout.kubeconfig('scheduler')}",
        "--leader-elect=false",
        f"--cert-dir={layout.run}/scheduler",
    )
