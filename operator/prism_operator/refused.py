"""A spec that cannot be rendered: the reconciler keeps what serves and says why in a condition."""

from __future__ import annotations


class Refused(Exception):
    """`reason` is a condition's reason in CamelCase; `message` says what to change, with the field's name."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(f"{reason}: {message}")
        self.reason = reason
        self.message = message
