"""Prints what one extra of the project needs, a requirement a line, from pyproject.toml: `requirements.py operator`.

With it the dependencies get an image layer that a change of Prism's own code leaves alone. Standard library only.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path


def requirements(project: dict[str, object], extra: str) -> Iterator[str]:
    """Those of the base and of the extra; an extra that names another (`name[http]`) is followed."""
    optional: dict[str, list[str]] = project["optional-dependencies"]  # type: ignore[assignment]
    own = re.compile(rf"^{re.escape(str(project['name']))}\[(\w+)\]$")
    for text in optional[extra]:
        if match := own.match(text):
            yield from requirements(project, match[1])
        else:
            yield text


def main(extra: str) -> int:
    """Reads pyproject.toml of the working directory."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    print("\n".join(dict.fromkeys([*project["dependencies"], *requirements(project, extra)])))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
