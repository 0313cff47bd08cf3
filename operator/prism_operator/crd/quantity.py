"""Kubernetes quantities of bytes."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Any

from kubernetes.utils.quantity import parse_quantity

_LARGEST = 1 << 63
"""Kubernetes has no quantity beyond; the digits of `1e9999999` would take this process hours to write out."""
_BYTES = re.compile(r"\d+(?:\.\d+)?(?:k|M|G|T|Ki|Mi|Gi|Ti)?")


def quantity_bytes(text: str) -> int:
    """`80Gi` -> 85899345920. Raises ValueError for what is no quantity of bytes."""
    if _BYTES.fullmatch(text) is None:
        raise ValueError(f"{text!r} is no quantity of bytes such as 512Mi or 80Gi")
    return int(parse_quantity(text))  # type: ignore[no-untyped-call]


def amount_of(quantity: Any) -> Decimal:
    """Of any quantity that the API server takes, as a pod's resources may have it: `500m`, `1e9`, `2Pi`, 0.1. Raises
    ValueError for what is none."""
    try:
        amount = Decimal(parse_quantity(str(quantity)))  # type: ignore[no-untyped-call]
    except ArithmeticError:
        amount = Decimal("inf")
    if not (amount.is_finite() and -_LARGEST < amount < _LARGEST):
        raise ValueError(f"{quantity!r} is no quantity below 2^63")
    return amount
