"""What a measurement leaves behind: aligned tables for people, JSON for the record, and where it was made."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

CARD_FIELDS = "name,driver_version,memory.total"
PACKAGES = ("prism-server", "torch", "triton", "transformers", "numpy", "pillow")


def table(header: Sequence[str], rows: Iterable[Sequence[object]], indent: str = "") -> str:
    """Columns as wide as they must be; the first is flush left, the others flush right. No trailing blanks."""
    lines = [list(header), *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    first, *others = widths
    aligned = ([line[0].ljust(first), *map(str.rjust, line[1:], others)] for line in lines)
    return "\n".join((indent + "  ".join(cells)).rstrip() for cells in aligned)


def environment() -> dict[str, Any]:
    """Versions and hardware that a number depends on."""
    return {
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_name(),
        "cpu_cores": os.cpu_count(),
    }


def cards() -> list[str]:
    """The GPUs of this machine as nvidia-smi names them; none where it is not there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    asked = [program, f"--query-gpu={CARD_FIELDS}", "--format=csv,noheader"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.splitlines()


def write_json(path: Path, report: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_name() -> str:
    """Linux's name of the processor; elsewhere Python's."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"
