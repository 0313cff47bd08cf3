"""The namespaces that hold the cluster, told from outside: start, find, enter, end, clean up.

Everything that the cluster does to a machine ends with its first process: the kernel then ends the others and takes
down mounts, addresses and rules. What a namespace cannot hold is kept in a list here and removed by `remove_traces`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from e2e.cluster.layout import Layout

FIXED_FOLDERS = {"/var/lib/kubelet": "kubelet", "/var/lib/cni": "cni-results", "/var/log": "var-log"}
"""Folders that no setting moves, and the part of the run's folder that is mounted over each."""
END_S = 60


def make_traces(layout: Layout) -> None:
    """Makes control groups and mount points, and remembers which of them were not there before."""
    made = [folder for folder in FIXED_FOLDERS if not Path(folder).exists()]
    if made:
        layout.made_folders.write_text(json.dumps(made))
    for folder in FIXED_FOLDERS:
        Path(folder).mkdir(parents=True, exist_ok=True)
    for kind, mounted in control_group_mounts():
        group = mounted / layout.name
        group.mkdir(exist_ok=True)
        # On version 1 a new cpuset is empty, and nothing may enter it.
        for name in ("cpuset.cpus", "cpuset.mems") if kind == "cgroup" and mounted.name == "cpuset" else ():
            (group / name).write_text((mounted / name).read_text())


def control_group_mounts() -> Iterator[tuple[str, Path]]:
    """Type (`cgroup`, version 1, or `cgroup2`) and folder of each mounted hierarchy."""
    for line in Path("/proc/mounts").read_text().splitlines():
        _, folder, kind, *_ = line.split()
        if kind in ("cgroup", "cgroup2"):
            yield kind, Path(folder)


def start(layout: Layout, command: Sequence[str], environment: dict[str, str]) -> None:
    """Starts the command as the first process of new namespaces and remembers it; its output goes to a log."""
    kinds = ("--mount", "--net", "--pid", "--uts")
    with (layout.logs / "init.log").open("wb") as log:
        outer = subprocess.Popen(
            ["unshare", *kinds, "--fork", "--kill-child", "--mount-proc", "--propagation", "slave", *command],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
    while not (inner := child_of(outer.pid)):
        if outer.poll() is not None:
            raise SystemExit(f"unshare failed:\n{(layout.logs / 'init.log').read_text()}")
        time.sleep(0.01)
    (layout.run / "init.json").write_text(json.dumps({"pid": inner, "namespace": network_namespace(inner)}))


def child_of(parent: int) -> int | None:
    """Process id of a child, or None."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The program's name, in parentheses, may hold spaces; after it come state and parent.
            if stat.read_text().rpartition(")")[2].split()[1] == str(parent):
                return int(stat.parent.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return None


def network_namespace(pid: int) -> str | None:
    """The kernel's name of a process's network namespace, or None when the process is gone."""
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return None


def first_process(layout: Layout) -> int | None:
    """Process id of the running cluster's first process. Its namespace tells it from a later process of that id."""
    try:
        init = json.loads((layout.run / "init.json").read_text())
    except FileNotFoundError:
        return None
    return init["pid"] if network_namespace(init["pid"]) == init["namespace"] else None


def entered(layout: Layout, command: Sequence[str]) -> list[str]:
    """The command line that runs a command inside, in the same working folder."""
    pid = first_process(layout)
    if pid is None:
        raise SystemExit(f"no cluster is running in {layout.run}")
    return ["nsenter", f"--target={pid}", "--mount", "--net", "--pid", "--uts", f"--wd={os.getcwd()}", *command]


def end(layout: Layout) -> None:
    """Kills the first process, if it runs, and returns when it is gone."""
    pid = first_process(layout)
    if pid is None:
        return
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + END_S
    while first_process(layout) is not None:
        if time.monotonic() > deadline:
            raise SystemExit(f"process {pid} does not end")
        time.sleep(0.02)


def remove_traces(layout: Layout) -> None:
    """Removes what `make_traces` made and the run's folder, also after a run that was killed. Logs are kept."""
    for _, mounted in control_group_mounts():
        remove_control_group(mounted / layout.name)
    if not layout.run.exists():
        return
    if layout.logs.exists():
        shutil.rmtree(layout.last_logs, ignore_errors=True)
        layout.last_logs.parent.mkdir(parents=True, exist_ok=True)
        layout.logs.rename(layout.last_logs)
    shutil.rmtree(layout.run)
    remove_mount_points(layout)


def remove_mount_points(layout: Layout) -> None:
    """Removes the mount points that were made, with the last cluster: to remove one also unmounts it, everywhere."""
    if not layout.made_folders.exists() or any(layout.run.parent.iterdir()):
        return
    for folder in map(Path, json.loads(layout.made_folders.read_text())):
        if folder.exists() and not any(folder.iterdir()):
            folder.rmdir()
    layout.made_folders.unlink()


def remove_control_group(top: Path) -> None:
    """Removes a control group and those in it; the kernel may take a moment to see that they are empty."""
    deadline = time.monotonic() + END_S
    while top.exists():
        for folder, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                if time.monotonic() > deadline:
                    raise
        time.sleep(0.02)
