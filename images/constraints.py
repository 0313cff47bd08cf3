"""Writes constraints.txt: the exact versions that the images install, taken from the environment the tests passed in.

`.venv/bin/python images/constraints.py > images/constraints.txt`
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = ("engine", "operator")
"""Extras of the project that the images install; one file pins them all."""
BUILD = {
    "hatchling": "1.33.0",
    "packaging": "26.4",
    "pathspec": "1.1.1",
    "pluggy": "1.7.0",
    "tomlkit": "0.15.2",
    "trove-classifiers": "2026.9.21.13",
}
"""The wheel stage's build backend and what it needs; the tests' environment does not hold all of it."""


def pins() -> dict[str, str]:
    """Name to version of everything that the images install on this platform, but Prism itself."""
    found: dict[str, str] = {}
    open_requirements = [Requirement(f"{PROJECT['name']}[{','.join(EXTRAS)}]")]
    seen: set[tuple[str, str]] = set()
    while open_requirements:
        requirement = open_requirements.pop()
        for extra in ("", *sorted(requirement.extras)):
            name = canonicalize_name(requirement.name)
            if (name, extra) in seen:
                continue
            seen.add((name, extra))
            if name != PROJECT["name"]:
                found[name] = distribution(name).version.split("+")[0]
            open_requirements += needed(name, extra)
    return found


def needed(name: str, extra: str) -> Iterator[Requirement]:
    """Requirements of a package with one extra (or none, as `""`), markers evaluated here."""
    for requirement in map(Requirement, requirement_texts(name, extra)):
        if requirement.marker is None:
            applies = extra == ""
        else:
            applies = requirement.marker.evaluate({"extra": extra}) and (
                extra == "" or not requirement.marker.evaluate({"extra": ""})
            )
        if applies:
            yield requirement


def requirement_texts(name: str, extra: str) -> list[str]:
    """The project's own come from pyproject.toml: what is installed of it may be older."""
    if name != PROJECT["name"]:
        return distribution(name).requires or []
    if not extra:
        return list(PROJECT["dependencies"])
    texts = PROJECT["optional-dependencies"][extra]
    return [f"{text}{' and' if ';' in text else ';'} extra == '{extra}'" for text in texts]


def main() -> int:
    """Prints the file."""
    print("# Written by images/constraints.py: the versions that the tests passed with. Linux, x86-64.")
    for name, version in sorted((BUILD | pins()).items()):
        print(f"{name}=={version}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
