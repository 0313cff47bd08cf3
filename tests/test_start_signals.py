"""SIGTERM while a server still imports: the pod is told to go before it has begun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVERS = ["prism-serve", "prism-router", "prism-operator"]
WATCH = """
import os, signal, sys

OWN = {*sys.stdlib_module_names, "prism_server", "prism_operator"}
TRIED = {"org", "usercustomize"}  # by Python itself, for nothing

class FirstImport:
    # tells the process to go at the first import of a library
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in OWN | TRIED:
            sys.meta_path.remove(self)
            os.write(1, f"{name} {os.getpid()}\\n".encode())
            os.kill(os.getpid(), signal.SIGTERM)
            os.write(1, b"deaf\\n")
            os._exit(9)

if os.path.basename(sys.argv[0]).startswith("prism-"):
    sys.meta_path.insert(0, FirstImport())
"""
"""As `sitecustomize`, which Python runs before the script: what is started is the script itself."""


def told_at_the_first_import(script: str, tmp_path: Path, *before: str) -> tuple[int, str]:
    """Exit code and output of a console script, started by the command `before`."""
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    command = [*before, str(Path(sys.executable).parent / script)]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stderr == ""
    return done.returncode, done.stdout


@pytest.mark.parametrize("script", SERVERS)
def test_sigterm_is_heard_before_any_library_is_imported(script: str, tmp_path: Path) -> None:
    code, said = told_at_the_first_import(script, tmp_path)
    assert (code, said.count("\n")) == (0, 1), said


def pid_namespace() -> list[str]:
    """The command that makes another one the first process of a namespace; skips where that is not permitted."""
    for flags in (["--pid", "--fork"], ["--user", "--map-root-user", "--pid", "--fork"]):
        try:
            subprocess.run(["unshare", *flags, "true"], capture_output=True, check=True, timeout=60)
        except (OSError, subprocess.CalledProcessError):
            continue
        return ["unshare", *flags]
    pytest.skip("no PID namespace may be made here")


@pytest.mark.parametrize("script", SERVERS)
def test_the_first_process_of_a_container_hears_sigterm_while_it_imports(script: str, tmp_path: Path) -> None:
    code, said = told_at_the_first_import(script, tmp_path, *pid_namespace())
    assert said.split()[1:] == ["1"], said
    assert code == 0
