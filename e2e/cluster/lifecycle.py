"""Brings the cluster up and down."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from e2e.cluster import credentials, dns, images, namespaces, node, registry
from e2e.cluster.layout import HERE, REPOSITORY, Layout
from e2e.cluster.phases import phase

UP_S = 400


def prepare(layout: Layout) -> None:
    """Installs packages and builds programs where they are missing: seconds, or ten minutes the first time."""
    if os.geteuid() != 0:
        raise SystemExit("a cluster of its own needs root; with another cluster, set KUBECONFIG instead")
    with phase("packages"):
        subprocess.run([HERE / "packages.sh"], check=True)
    if not layout.programs.exists():
        with phase("programs"):
            partial = layout.programs.with_suffix(".partial")
            shutil.rmtree(partial, ignore_errors=True)
            subprocess.run([HERE / "programs/build.sh", partial], check=True)
            partial.rename(layout.programs)


def up(layout: Layout) -> bool:
    """Starts the cluster and returns when it serves. False if it ran already."""
    prepare(layout)
    with locked(layout):
        if namespaces.first_process(layout) is not None:
            wait(layout)  # an `up` may have been killed before it was ready
            return False
        namespaces.remove_traces(layout)
        with phase("pause image"):
            pause = images.pause(layout)
        with phase("cluster"):
            write_files(layout)
            shutil.copy(pause, layout.run / "pause.tar")
            namespaces.make_traces(layout)
            environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONDONTWRITEBYTECODE": "1"}
            namespaces.start(layout, [sys.executable, "-m", "e2e.cluster", "init"], environment)
            wait(layout)
    return True


def pull(layout: Layout, names: Sequence[str]) -> None:
    """Brings images onto the running node: gigabytes the first time, for which no test should have to wait.

    Those of earlier states of the code leave it afterwards; the layers that they share with these stay.
    """
    with phase("images on the node"):
        for name in names:
            ctr(layout, "pull", "--plain-http", name)
        refs = [line.split() for line in ctr(layout, "ls").splitlines()[1:]]
        digests = {ref[0]: ref[2] for ref in refs}  # a reference, its media type, the digest it leads to
        earlier = {digest for ref, digest in digests.items() if images.is_projects(ref)}
        earlier -= {digests[name] for name in names}
        stale = [ref for ref, digest in digests.items() if digest in earlier]
        if stale:
            ctr(layout, "rm", *stale)


def ctr(layout: Layout, *arguments: str) -> str:
    """Asks the node's container runtime about images, in kubelet's namespace. Returns what it prints."""
    program = (layout.programs / "ctr", "--address", layout.containerd_socket, "--namespace", "k8s.io", "image")
    command = namespaces.entered(layout, [*map(str, program), *arguments])
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise SystemExit(f"ctr image {' '.join(arguments)} failed:\n{done.stdout[-2000:]}")
    return done.stdout


def write_files(layout: Layout) -> None:
    """The run's folder with all configuration."""
    layout.logs.mkdir(parents=True)
    layout.containerd.mkdir(parents=True, exist_ok=True)
    for part in (credentials, node, dns, registry):
        part.write_files(layout)


def wait(layout: Layout) -> None:
    """Returns once everything is ready; ends with the reason, and without the cluster, if it is not."""
    deadline = time.monotonic() + UP_S
    while not (layout.run / "ready.json").exists():
        if namespaces.first_process(layout) is None or time.monotonic() > deadline:
            namespaces.end(layout)
            namespaces.remove_traces(layout)
            reason = (layout.last_logs / "init.log").read_text()
            raise SystemExit(f"the cluster did not start; its logs are in {layout.last_logs}\n{reason}")
        time.sleep(0.02)


def down(layout: Layout) -> None:
    """Ends the cluster, or cleans up after one that was killed."""
    with locked(layout), phase("down"):
        namespaces.end(layout)
        namespaces.remove_traces(layout)


def status(layout: Layout) -> str:
    """One line, and the seconds at which each part was ready."""
    pid = namespaces.first_process(layout)
    if pid is None:
        return "down, with leftovers of a killed run" if layout.run.exists() else "down"
    ready = layout.run / "ready.json"
    if not ready.exists():
        return f"starting, process {pid}"
    parts = ", ".join(f"{name} {seconds} s" for name, seconds in json.loads(ready.read_text()).items())
    return f"up, process {pid}; ready after: {parts}"


@contextmanager
def locked(layout: Layout) -> Iterator[None]:
    """One at a time starts or ends a cluster."""
    with (layout.cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
