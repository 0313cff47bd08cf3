"""Watches of the API server: every change in its order, where polling would miss some."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import quote

from e2e.harness import Cluster, Object

PODS = ("/api/v1", "pods")
PRISM_DEPLOYMENTS = ("/apis/prism-infer.io/v1alpha1", "prismdeployments")
LONGEST_S = 3600


@contextmanager
def watching(
    cluster: Cluster,
    kind: tuple[str, str],
    namespace: str,
    take: Callable[[str, Object], None],
    begin: Callable[[], None] | None = None,
    label: str = "",
) -> Iterator[None]:
    """Calls `take` with the type and the object of each event, from a thread of its own, while the block runs.

    What is there already comes first, as `ADDED`; then `begin` is called. On the way out a last moment is given to
    events that are under way.
    """
    group, plural = kind
    path = f"{group}/namespaces/{namespace}/{plural}?labelSelector={quote(label)}"
    found = json.loads(cluster.kubectl("get", "--raw", path))
    for item in found["items"]:
        take("ADDED", item)
    if begin is not None:
        begin()
    version = found["metadata"]["resourceVersion"]
    more = f"&watch=true&resourceVersion={version}&timeoutSeconds={LONGEST_S}"
    process = subprocess.Popen(["kubectl", "get", "--raw", path + more], stdout=subprocess.PIPE, text=True)

    def follow() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            take(event["type"], event["object"])

    reader = threading.Thread(target=follow, daemon=True)
    reader.start()
    try:
        yield
        reader.join(1)
        if process.poll() is not None:
            raise RuntimeError("the watch has ended by itself")
    finally:
        process.terminate()
        process.wait(10)
        reader.join(10)
