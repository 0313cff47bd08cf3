"""`python -m prism_operator.crd` prints the CustomResourceDefinition as YAML."""

from __future__ import annotations

import sys

import yaml  # type: ignore[import-untyped,unused-ignore]

from prism_operator.crd.schema import crd


def crd_yaml() -> str:
    """The file that the chart carries."""
    header = "# Made by `python -m prism_operator.crd` from operator/prism_operator/crd; a test compares them.\n"
    return header + str(yaml.safe_dump(crd(), sort_keys=False, width=120, allow_unicode=True))


if __name__ == "__main__":
    sys.stdout.write(crd_yaml())
