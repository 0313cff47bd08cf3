"""Where the cluster keeps its files, and its addresses."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent.parent

NODE = "node-1"
NODE_ADDRESS = "10.99.0.1"
SERVICE_NETWORK = "10.96.0.0/16"
POD_NETWORK = "10.244.0.0/16"
DNS_ADDRESS = "10.96.0.10"
API_URL = f"https://{NODE_ADDRESS}:6443"
REGISTRY = "localhost:5000"
"""Of the cluster's own registry, as image references spell it."""


def files_digest(files: Iterable[Path], base: Path) -> str:
    """Twelve hexadecimal digits that change with the name, the mode or the content of any of the files."""
    digest = hashlib.sha256()
    for path in sorted(files):
        executable = os.access(path, os.X_OK)
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(base)}\0{executable:d}\0{content}\n".encode())
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Layout:
    """The folders of one cluster. `cache` outlives runs; `run` is gone after `down`."""

    cache: Path
    name: str

    @classmethod
    def from_environment(cls) -> Layout:
        """Reads `PRISM_E2E_CACHE` (default `~/.cache/prism-e2e`) and `PRISM_E2E_NAME`, for a second cluster."""
        cache = Path(os.environ.get("PRISM_E2E_CACHE", "~/.cache/prism-e2e")).expanduser().resolve()
        cache.mkdir(parents=True, exist_ok=True)
        return cls(cache, os.environ.get("PRISM_E2E_NAME", "prism-e2e"))

    @property
    def programs(self) -> Path:
        """The built programs, in a folder named after all that they are built from."""
        sources = HERE / "programs"
        digest = files_digest((path for path in sources.rglob("*") if path.is_file()), sources)
        return self.cache / "programs" / digest

    @property
    def images(self) -> Path:
        """Archives of the base and pause images."""
        return self.cache / "images"

    @property
    def registry(self) -> Path:
        """What the registry holds; clusters may share it."""
        return self.cache / "registry"

    @property
    def buildah(self) -> Path:
        """Storage of image builds, apart from that of the person who runs them."""
        return self.cache / "buildah"

    @property
    def containerd(self) -> Path:
        """The node's image store, kept so that a second run pulls nothing."""
        return self.cache / "nodes" / self.name

    @property
    def run(self) -> Path:
        """Files of the running cluster."""
        return self.cache / "runs" / self.name

    @property
    def made_folders(self) -> Path:
        """Names the mount points that some cluster made on this machine."""
        return self.cache / "made-folders.json"

    @property
    def last_logs(self) -> Path:
        """Logs of the run before, kept by `down`."""
        return self.cache / "last-logs" / self.name

    @property
    def logs(self) -> Path:
        """One file a program."""
        return self.run / "logs"

    @property
    def pki(self) -> Path:
        """The API server's certificate and the key of service accounts."""
        return self.run / "pki"

    @property
    def containerd_socket(self) -> Path:
        """Of the node's container runtime."""
        return self.run / "containerd.sock"

    def kubeconfig(self, user: str = "admin") -> Path:
        """Credentials of one user, as kubectl reads them."""
        return self.run / f"{user}.kubeconfig"

    def environment(self) -> dict[str, str]:
        """Variables of a process that talks to this cluster: credentials, and the programs first on the path.

        kubectl and helm keep their own files in the run's folder.
        """
        helm = {f"HELM_{kind}_HOME": f"{self.run}/helm/{kind.lower()}" for kind in ("CACHE", "CONFIG", "DATA")}
        return {
            **os.environ,
            **helm,
            "KUBECACHEDIR": f"{self.run}/kubectl",
            "KUBECONFIG": str(self.kubeconfig()),
            "CONTAINERD_ADDRESS": str(self.containerd_socket),
            "PATH": f"{self.programs}:{os.environ.get('PATH', '')}",
        }


@dataclass(frozen=True)
class Program:
    """A process of the cluster. Its log file has its name."""

    name: str
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, name: str, *arguments: str) -> Program:
        """Reads as a command line."""
        return cls(name, arguments)
