"""What a pod of ours may do: what the `restricted` Pod Security Standard allows, and no more."""

from __future__ import annotations

from typing import Any

USER_ID = 65532
"""Of every process in our pods, whatever the image's own user is; volumes belong to the group of the same number."""


def pod_security() -> dict[str, Any]:
    return {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "fsGroup": USER_ID,
        "fsGroupChangePolicy": "OnRootMismatch",  # a model has many files, and most of the time they are right
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security(read_only_root: bool) -> dict[str, Any]:
    """With a card a read-only root is not the default: some GPU runtimes' hooks write into it."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": read_only_root,
    }
