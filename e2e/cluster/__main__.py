"""The command line: `python -m e2e.cluster up|down|exec|run|status|kubeconfig|images`."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys

from e2e.cluster import images, init, lifecycle, namespaces
from e2e.cluster.layout import Layout
from e2e.cluster.phases import phase


def arguments() -> argparse.Namespace:
    """Parses the command line. What follows `--` is the command."""
    text = "A real one-node Kubernetes in namespaces of its own."
    parser = argparse.ArgumentParser(prog="python -m e2e.cluster", description=text)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verbs.add_parser("up", help="start it; does nothing when it runs")
    verbs.add_parser("down", help="end it; cleans up after a run that was killed")
    verbs.add_parser("status", help="whether it runs")
    verbs.add_parser("kubeconfig", help="path of the administrator's credentials, for use inside")
    verbs.add_parser("images", help="build Prism's images and put them into the registry")
    for verb, text in (("exec", "run a command inside"), ("run", "images, up, exec, and down if it was not up before")):
        verbs.add_parser(verb, help=text).add_argument("command", nargs=argparse.REMAINDER)
    verbs.add_parser("init")
    return parser.parse_args()


def run(layout: Layout, command: list[str]) -> int:
    """The whole of `make e2e`. Ends the cluster whatever becomes of the command, if it started it."""
    lifecycle.prepare(layout)
    images.build(layout)
    started = lifecycle.up(layout)
    try:
        lifecycle.pull(layout, images.project_images())
        with phase("command"):
            environment = layout.environment() | images.environment()
            return subprocess.run(namespaces.entered(layout, command), env=environment).returncode
    finally:
        if started:
            lifecycle.down(layout)


def main() -> int:
    """Returns the exit status, for `exec` and `run` that of the command."""
    given, layout = arguments(), Layout.from_environment()
    command = [word for place, word in enumerate(getattr(given, "command", ())) if (place, word) != (0, "--")]
    match given.verb:
        case "up":
            if not lifecycle.up(layout):
                print("already up")
        case "down":
            lifecycle.down(layout)
        case "status":
            print(lifecycle.status(layout))
        case "kubeconfig":
            print(layout.kubeconfig())
        case "images":
            lifecycle.prepare(layout)
            print(f"tag {images.build(layout)}")
        case "exec":
            line = namespaces.entered(layout, command or [os.environ.get("SHELL", "bash")])
            os.execvpe(line[0], line, layout.environment() | images.environment())
        case "run":
            return run(layout, command)
        case "init":
            init.main(layout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
