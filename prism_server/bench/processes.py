"""Processes of a measurement that say in their first line where they listen."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from prism_server.errors import StartupError
from prism_server.settings_cli import ENV_PREFIX

URL = re.compile(r"http://[^\s,]+")
STOP_TIMEOUT_S = 30.0


@contextmanager
def running(module: str, arguments: Sequence[str]) -> Iterator[list[str]]:
    """`python -m module`; the URLs of its first line. `PRISM_*` variables do not reach it. Ends with the block.

    Raises StartupError where it says nothing of the kind.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        urls = URL.findall(process.stdout.readline())
        if not urls:
            raise StartupError(f"{module} did not start")
        yield urls
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
