"""All tests in two halves side by side, each on a cluster of its own: most of a test's time is waiting.

Side by side on one cluster they would disturb one another: some change the node's cards, some take the CRD away.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from e2e.cluster.layout import REPOSITORY
from e2e.cluster.phases import phase

HERE = Path(__file__).parent
FIRST_HALF = ("test_cluster_itself", "test_gpu_plans", "test_operator_rows", "test_rollout", "test_router")
"""About as long as the rest."""
CHART = "tests/chart"
"""The chart's render tests need helm, which is there inside a cluster's environment."""


def halves() -> tuple[list[str], list[str]]:
    """Test files, relative to the repository. A new one belongs to the second half until somebody moves it."""
    files = sorted(HERE.glob("test_*.py"))
    names = [str(file.relative_to(REPOSITORY)) for file in files]
    first = [name for name, file in zip(names, files, strict=True) if file.stem in FIRST_HALF]
    return [*first, CHART], [name for name in names if name not in first]


def start(number: int, files: list[str], output: IO[str]) -> subprocess.Popen[str]:
    """One half on its own cluster, its output to a file."""
    name = os.environ.get("PRISM_E2E_NAME", "prism-e2e")
    pytest = [sys.executable, "-m", "pytest", "-n0", "--durations=8", *files]
    command = [sys.executable, "-m", "e2e.cluster", "run", "--", *pytest]
    environment = os.environ | {"PRISM_E2E_NAME": name if number == 1 else f"{name}-{number}", "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=output, stderr=subprocess.STDOUT, cwd=REPOSITORY, text=True
    )


def main() -> int:
    """Builds what both need, runs both, prints one after the other. Returns 0 when both passed."""
    built = subprocess.run([sys.executable, "-m", "e2e.cluster", "images"], cwd=REPOSITORY)
    if built.returncode != 0:
        return built.returncode
    with TemporaryFile("w+") as first, TemporaryFile("w+") as second, phase("both halves"):
        outputs = (first, second)
        running = [
            start(number, files, output)
            for number, (files, output) in enumerate(zip(halves(), outputs, strict=True), 1)
        ]
        codes = [process.wait() for process in running]
        for number, output in enumerate(outputs, 1):
            output.seek(0)
            print(f"--- half {number}, exit code {codes[number - 1]} ---\n{output.read()}", flush=True)
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
