"""The first process of the namespaces: makes the node's network and mounts, starts the programs in order, reaps."""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from e2e.cluster import control_plane, credentials, dns, node, policy, registry
from e2e.cluster.layout import API_URL, NODE, NODE_ADDRESS, Layout, Program
from e2e.cluster.namespaces import FIXED_FOLDERS

READY_S = 300
"""Far beyond what any one program takes to answer."""


def main(layout: Layout) -> None:
    """Boots, writes `ready.json` with the seconds since the start at which each part was ready, and stays."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    make_network()
    make_mounts(layout)
    programs = Programs(layout)
    boot(layout, programs)
    partial = layout.run / "ready.json.partial"
    partial.write_text(json.dumps(programs.ready_s))
    partial.rename(layout.run / "ready.json")
    programs.reap_for_ever()


def make_network() -> None:
    """The node's address on a bridge without ports. Everything else is unreachable from here, and this from there."""
    for command in (
        "link set lo up",
        "link add node0 type bridge",
        f"addr add {NODE_ADDRESS}/24 dev node0",
        "link set node0 up",
        "route add default dev node0",
    ):
        subprocess.run(["ip", *command.split()], check=True)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


def make_mounts(layout: Layout) -> None:
    """Own folders over those that programs insist on, and the cluster's DNS for processes on the node."""
    # Sockets, locks and network namespaces of the machine's own programs stay out of sight and out of reach.
    mount("-t", "tmpfs", "tmpfs", "/run")
    Path("/run/lock").mkdir()
    for folder, own in FIXED_FOLDERS.items():
        (layout.run / own).mkdir()
        mount("--bind", f"{layout.run / own}", folder)
    resolver = Path("/etc/resolv.conf").resolve()
    if not resolver.exists():  # a link into the /run that is hidden now
        resolver.parent.mkdir(parents=True, exist_ok=True)
        resolver.touch()
    mount("--bind", f"{layout.run}/resolv.conf", f"{resolver}")
    # Containers receive later mounts, such as their volumes, only from a shared tree.
    mount("--make-rshared", "/")


def mount(*arguments: str) -> None:
    """mount(8)."""
    subprocess.run(["mount", *arguments], check=True)


class Programs:
    """The cluster's processes, children of this one."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.ready_s: dict[str, float] = {}
        self.started_at = time.monotonic()

    def start(self, *programs: Program) -> None:
        """Starts each with its own log."""
        environment = self.layout.environment()
        for program in programs:
            path = shutil.which(program.name, path=environment["PATH"])
            if path is None:
                raise SystemExit(f"{program.name} is not installed")
            with (self.layout.logs / f"{program.name}.log").open("ab") as log:
                self.running[program.name] = subprocess.Popen(
                    [path, *program.arguments], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
                )

    def wait(self, what: str, check: Callable[[], bool]) -> None:
        """Polls until it holds. Ends with the log's last lines as soon as a program has ended."""
        deadline = time.monotonic() + READY_S
        while not holds(check):
            for name, process in self.running.items():
                if process.poll() is not None:
                    log = (self.layout.logs / f"{name}.log").read_text(errors="replace").splitlines()
                    raise SystemExit("\n".join([f"{name} ended with {process.returncode}", *log[-10:]]))
            if time.monotonic() > deadline:
                raise SystemExit(f"{what}: not ready within {READY_S} s")
            time.sleep(0.05)
        self.ready_s[what] = round(time.monotonic() - self.started_at, 2)

    def reap_for_ever(self) -> None:
        """Orphans of the whole PID namespace become children of its first process. Ends of programs are logged."""
        while True:
            try:
                pid, status = os.waitpid(-1, 0)
            except ChildProcessError:
                raise SystemExit("every program has ended") from None
            for name, process in self.running.items():
                if process.pid == pid:
                    print(f"{name} ended with {os.waitstatus_to_exitcode(status)}", flush=True)


def holds(check: Callable[[], bool]) -> bool:
    """A server that does not answer yet does not hold yet."""
    try:
        return check()
    except OSError:
        return False


def boot(layout: Layout, programs: Programs) -> None:
    """Starts everything as early as what it needs is there."""
    programs.start(control_plane.etcd(layout), node.containerd(layout), registry.program(layout))
    programs.wait("etcd", lambda: b"true" in get(f"{control_plane.ETCD_URL}/health"))
    programs.start(control_plane.api_server(layout))
    programs.wait("containerd", lambda: ctr(layout, "version").returncode == 0)
    ctr(layout, "--namespace", "k8s.io", "image", "import", f"{layout.run}/pause.tar").check_returncode()

    token = credentials.admin_token(layout)
    programs.wait("API server", lambda: get(f"{API_URL}/readyz", token) == b"ok")
    programs.start(control_plane.controllers(layout), control_plane.scheduler(layout))
    programs.start(node.kubelet(layout), node.proxy(layout), dns.program(layout))
    apply(layout, dns.objects())
    programs.wait("node", lambda: node_is_ready(json.loads(get(f"{API_URL}/api/v1/nodes/{NODE}", token))))
    programs.start(policy.program(layout))  # needs the node object
    programs.wait("DNS", lambda: get(dns.READY_URL) == b"OK")


def node_is_ready(node_object: Mapping[str, Mapping[str, Sequence[Mapping[str, str]]]]) -> bool:
    """By its Ready condition."""
    conditions = node_object["status"].get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)


def get(url: str, token: str | None = None) -> bytes:
    """Body of an answer with status 2xx. The certificate is the server's own, made a moment ago."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    context = ssl._create_unverified_context()
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), context=context, timeout=5) as answer:
        body: bytes = answer.read()
        return body


def ctr(layout: Layout, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """containerd's own client."""
    return subprocess.run(
        [layout.programs / "ctr", "--address", layout.containerd_socket, *arguments], capture_output=True
    )


def apply(layout: Layout, objects: Sequence[Mapping[str, object]]) -> None:
    """kubectl apply."""
    subprocess.run(
        [layout.programs / "kubectl", "--kubeconfig", layout.kubeconfig(), "apply", "-f", "-"],
        input=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(objects)}).encode(),
        check=True,
        capture_output=True,
    )
