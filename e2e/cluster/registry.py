"""An image registry over a folder: one runs in the cluster to pull from, one beside it while images are pushed."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from e2e.cluster.layout import REGISTRY, Layout, Program

PORT = int(REGISTRY.rpartition(":")[2])
START_S = 60


def config(folder: Path) -> str:
    """The registry's configuration, in the part of YAML that is JSON."""
    storage = {"filesystem": {"rootdirectory": str(folder)}}
    http = {"addr": f"127.0.0.1:{PORT}"}
    return json.dumps({"version": 0.1, "log": {"level": "warn"}, "storage": storage, "http": http})


def write_files(layout: Layout) -> None:
    """For the one in the cluster. Image references with `localhost` are pulled without TLS."""
    layout.registry.mkdir(parents=True, exist_ok=True)
    (layout.run / "registry.json").write_text(config(layout.registry))


def program(layout: Layout) -> Program:
    """The one in the cluster."""
    return Program.of("docker-registry", "serve", f"{layout.run}/registry.json")


def holds(layout: Layout, repository: str, tag: str) -> bool:
    """Whether the folder has the image; asks no server."""
    tags = layout.registry / "docker/registry/v2/repositories" / repository / "_manifests/tags"
    return (tags / tag / "current/link").exists()


def forget_tags(layout: Layout, repository: str, keep: str) -> None:
    """All of a repository but one. The files go with `collect_garbage`."""
    tags = layout.registry / "docker/registry/v2/repositories" / repository / "_manifests/tags"
    for tag in tags.iterdir():
        if tag.name != keep:
            shutil.rmtree(tag)


def collect_garbage(layout: Layout) -> None:
    """Deletes what no tag leads to. Nobody may be pushing."""
    file = layout.cache / "push-registry.json"
    file.write_text(config(layout.registry))
    command = ["docker-registry", "garbage-collect", "--delete-untagged", file]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"docker-registry cannot collect garbage:\n{done.stdout[-2000:]}")


@contextmanager
def serving(layout: Layout) -> Iterator[list[str]]:
    """Runs a registry that only commands with the yielded prefix reach, under the name that it has in the cluster.

    A network namespace of its own keeps the name free of a port that another program may hold.
    """
    layout.registry.mkdir(parents=True, exist_ok=True)
    file = layout.cache / "push-registry.json"
    file.write_text(config(layout.registry))
    script = 'ip link set lo up && exec docker-registry serve "$0"'
    with (layout.cache / "push-registry.log").open("wb") as log:
        process = subprocess.Popen(["unshare", "--net", "sh", "-c", script, file], stdout=log, stderr=log)
    try:
        wait(process)
        yield ["nsenter", f"--target={process.pid}", "--net"]
    finally:
        process.terminate()
        process.wait(START_S)


def wait(process: subprocess.Popen[bytes]) -> None:
    """Returns once it listens, by the kernel's table of its namespace (state 0A)."""
    deadline = time.monotonic() + START_S
    table = Path(f"/proc/{process.pid}/net/tcp")
    while f":{PORT:04X} 00000000:0000 0A" not in table.read_text():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("docker-registry does not start")
        time.sleep(0.02)
