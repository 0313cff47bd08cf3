"""What the tests work with: the cluster under test, its images, waiting for a state."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from e2e.cluster.layout import Layout

T = TypeVar("T")
Object = dict[str, Any]
"""A Kubernetes object as JSON has it."""
PATIENCE_S = 300
"""For what takes up to half a minute on an idle machine, such as the start of an engine, which imports torch."""
WAIT = f"--timeout={PATIENCE_S}s"
"""As a flag of kubectl and helm."""


def eventually(what: str, check: Callable[[], T | None], timeout_s: float = PATIENCE_S, interval_s: float = 0.2) -> T:
    """Polls until the check returns something true, and returns that. Its `AssertionError` means not yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            if found := check():
                return found
            reason = ""
        except AssertionError as error:
            reason = f": {error}"
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}{reason}")
        time.sleep(interval_s)


@dataclass(frozen=True)
class Images:
    """References of the images under test, as the cluster pulls them."""

    registry: str
    tag: str
    base: str
    """Has Python and nothing of Prism: for peers in tests."""

    @classmethod
    def from_environment(cls) -> Images:
        """Set by `python -m e2e.cluster`; by a person for a cluster of their own, where they pushed the images."""
        names = ("PRISM_E2E_REGISTRY", "PRISM_E2E_TAG", "PRISM_E2E_BASE_IMAGE")
        absent = [name for name in names if not os.environ.get(name)]
        if absent:
            raise RuntimeError(
                f"set {', '.join(absent)}: where this cluster finds the images that images/build.sh made"
            )
        return cls(*(os.environ[name] for name in names))

    def __getitem__(self, name: str) -> str:
        """`images["operator"]`."""
        return f"{self.registry}/prism-{name}:{self.tag}"


@dataclass(frozen=True)
class Cluster:
    """The cluster that KUBECONFIG names."""

    images: Images
    own: Layout | None
    """Of the cluster that `python -m e2e.cluster` started; None for another one."""

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """What it printed; a failure's message is in the exception."""
        return run(["kubectl", *arguments], stdin)

    def helm(self, *arguments: str, stdin: str | None = None) -> str:
        """What it printed; a failure's message is in the exception."""
        return run(["helm", *arguments], stdin)

    def apply(self, *objects: Object) -> None:
        """Server-side, as a person's field manager."""
        items = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.kubectl("apply", "--server-side", "-f", "-", stdin=json.dumps(items))

    def replace(self, found: Object) -> None:
        """All of an object that is there: what it does not say is gone."""
        self.kubectl("replace", "-f", "-", stdin=json.dumps(found))

    def get(self, kind: str, name: str, namespace: str | None = None) -> Object | None:
        """The object, or None where there is none."""
        where = ["-n", namespace] if namespace else []
        printed = self.kubectl("get", kind, name, *where, "-o", "json", "--ignore-not-found")
        found: Object | None = json.loads(printed) if printed else None
        return found

    def read(self, kind: str, name: str, namespace: str | None = None) -> Object:
        """The object, which must be there."""
        found = self.get(kind, name, namespace)
        assert found is not None, f"no {kind} {name}"
        return found

    def list(self, kind: str, namespace: str, selector: str = "") -> list[Object]:
        """All objects of a kind in a namespace."""
        items: list[Object] = json.loads(self.kubectl("get", kind, "-n", namespace, "-l", selector, "-o", "json"))[
            "items"
        ]
        return items

    @contextmanager
    def node_labels(self, node: str, labels: Mapping[str, str]) -> Iterator[None]:
        """Labels a node while the block runs."""
        self.kubectl("label", "node", node, "--overwrite", *(f"{name}={value}" for name, value in labels.items()))
        try:
            yield
        finally:
            self.kubectl("label", "node", node, *(f"{name}-" for name in labels))


def run(command: list[str], stdin: str | None) -> str:
    """Runs to its end, which flags such as `WAIT` may put off."""
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=2 * PATIENCE_S)
    if done.returncode != 0:
        raise CommandFailed(command, done.stderr.strip() or done.stdout.strip())
    return done.stdout


class CommandFailed(Exception):
    """A command's own words about why it failed."""

    def __init__(self, command: list[str], message: str) -> None:
        super().__init__(f"{' '.join(command)}: {message}")
        self.message = message


def pod(name: str, namespace: str, image: str, *command: str, **spec: Any) -> Object:
    """A pod of one container that any namespace admits, the strictest (`restricted`) included."""
    container = {
        "name": "main",
        "image": image,
        "command": list(command),
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **spec.pop("container", {}),
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": name, **spec.pop("labels", {})}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "automountServiceAccountToken": False,
            "securityContext": {"runAsUser": 65532, "runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            **spec,
        },
    }
