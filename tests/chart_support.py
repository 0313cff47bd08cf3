"""helm and the rules of Pod Security for the chart's tests."""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
CHART = ROOT / "charts" / "prism"

Object = dict[str, Any]


class HelmError(Exception):
    """helm refused; the text is what it said."""


class Chart:
    """The chart through helm's own renderer and schema check."""

    def __init__(self, helm: str) -> None:
        self._helm = helm

    def run(self, *arguments: str, values: Object | None = None) -> str:
        """Raises HelmError."""
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump(values or {}, file)
            file.flush()
            command = [self._helm, *arguments, "--values", file.name]
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        if result.returncode:
            raise HelmError(result.stdout + result.stderr)
        return result.stdout

    def render(
        self, values: Object | None = None, release: str = "prism", namespace: str = "prism-system"
    ) -> list[Object]:
        """Every object of the release, hooks included."""
        return list(self._render(json.dumps(values or {}), release, namespace))

    @functools.cache  # noqa: B019 - one instance a session
    def _render(self, values: str, release: str, namespace: str) -> tuple[Object, ...]:
        text = self.run("template", release, str(CHART), "--namespace", namespace, values=json.loads(values))
        return tuple(document for document in yaml.load_all(text, yaml.CSafeLoader) if document)


def of_kind(objects: list[Object], *kinds: str) -> list[Object]:
    return [item for item in objects if item["kind"] in kinds]


def only(objects: list[Object], kind: str) -> Object:
    [item] = of_kind(objects, kind)
    return item


def pod_specs(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """(kind/name, pod spec) of every pod and pod template."""
    for item in objects:
        spec = item["spec"] if item["kind"] == "Pod" else item.get("spec", {}).get("template", {}).get("spec")
        if spec:
            yield f"{item['kind']}/{item['metadata']['name']}", spec


def operator_container(objects: list[Object]) -> Object:
    [container] = only(objects, "Deployment")["spec"]["template"]["spec"]["containers"]
    return container


VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret", "image",
}  # fmt: skip


def violations(pod: Object) -> list[str]:
    """What in a pod's spec is against Pod Security `restricted`, and against a read-only root, which Prism adds.

    Source: Kubernetes, Pod Security Standards, restricted profile (which includes baseline).
    """
    found = [f"{key} is set" for key in ("hostNetwork", "hostPID", "hostIPC") if pod.get(key)]
    found += [
        f"volume {volume['name']}: {kind}"
        for volume in pod.get("volumes", ())
        for kind in volume.keys() - {"name"}
        if kind not in VOLUMES
    ]
    shared = pod.get("securityContext", {})
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        own = container.get("securityContext", {})
        merged = {**shared, **own}
        capabilities = own.get("capabilities", {})
        rules = {
            "runAsNonRoot": merged.get("runAsNonRoot") is True,
            "runAsUser": merged.get("runAsUser", 1) != 0,
            "seccompProfile": merged.get("seccompProfile", {}).get("type") in {"RuntimeDefault", "Localhost"},
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is False,
            "privileged": not own.get("privileged"),
            "capabilities.drop": "ALL" in capabilities.get("drop", ()),
            "capabilities.add": set(capabilities.get("add", ())) <= {"NET_BIND_SERVICE"},
            "hostPort": not any(port.get("hostPort") for port in container.get("ports", ())),
            "procMount": own.get("procMount", "Default") == "Default",
            "readOnlyRootFilesystem": own.get("readOnlyRootFilesystem") is True,
        }
        found += [f"container {container['name']}: {rule}" for rule, holds in rules.items() if not holds]
    return found
