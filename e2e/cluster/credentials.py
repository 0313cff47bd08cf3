"""Users with bearer tokens, their kubeconfig files and the key of service accounts.

Tokens instead of client certificates, and the API server's self-signed certificate as its own authority: nothing else
of a public key infrastructure is needed for a cluster that no one can reach from outside its namespace.
"""

from __future__ import annotations

import json
import secrets
import subprocess
from pathlib import Path

from e2e.cluster.layout import API_URL, NODE, Layout

USERS = {
    "admin": ("admin", "system:masters"),
    "controllers": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "proxy": ("system:kube-proxy", ""),
    "kubelet": (f"system:node:{NODE}", "system:nodes"),
    "dns": ("dns", "system:masters"),
    "policy": ("policy", "system:masters"),
}
"""Kubeconfig name to user name and group."""


def write_files(layout: Layout) -> None:
    """Writes tokens, kubeconfig files and the service accounts' key pair, all new for this run."""
    layout.pki.mkdir(mode=0o700)
    rows = []
    for name, (user, group) in USERS.items():
        token = secrets.token_hex(16)
        rows.append(f'{token},{user},{name},"{group}"' if group else f"{token},{user},{name}")
        path = layout.kubeconfig(name)
        path.touch(mode=0o600)
        path.write_text(json.dumps(kubeconfig(token, certificate(layout))))
    tokens_file(layout).touch(mode=0o600)
    tokens_file(layout).write_text("\n".join(rows) + "\n")
    key, public = service_account_keys(layout)
    subprocess.run(["openssl", "genrsa", "-out", key, "2048"], check=True, capture_output=True)
    subprocess.run(["openssl", "rsa", "-in", key, "-pubout", "-out", public], check=True, capture_output=True)


def kubeconfig(token: str, authority: Path) -> dict[str, object]:
    """One cluster, one user, one context."""
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "e2e",
        "clusters": [{"name": "e2e", "cluster": {"server": API_URL, "certificate-authority": str(authority)}}],
        "users": [{"name": "user", "user": {"token": token}}],
        "contexts": [{"name": "e2e", "context": {"cluster": "e2e", "user": "user"}}],
    }


def admin_token(layout: Layout) -> str:
    """For requests without a client library."""
    token: str = json.loads(layout.kubeconfig("admin").read_text())["users"][0]["user"]["token"]
    return token


def certificate(layout: Layout) -> Path:
    """The API server writes it at its first start."""
    return layout.pki / "apiserver.crt"


def tokens_file(layout: Layout) -> Path:
    """For the API server's `--token-auth-file`."""
    return layout.pki / "tokens.csv"


def service_account_keys(layout: Layout) -> tuple[Path, Path]:
    """Private and public key, PEM."""
    return layout.pki / "service-accounts.key", layout.pki / "service-accounts.pub"
