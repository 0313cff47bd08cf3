"""Whether an object in the cluster is already what was meant, so that a pass with nothing to do writes nothing.

Two signs together: a digest of what was applied last, kept as an annotation on the object itself (it catches what has
left the spec since), and every field that is wanted being there as wanted (it catches what others have changed). Fields
that nobody asked for are defaults or other managers' and do not count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from prism_operator.crd.quantity import amount_of

APPLIED_DIGEST = "prism-infer.io/applied-digest"
LIST_KEYS = ("name", "uid", "type", "key", "port", "containerPort", "mountPath", "topologyKey")
"""Fields that tell the items of a merged list apart."""
QUANTITY_FIELDS = frozenset({"limits", "requests", "sizeLimit", "averageValue"})


def stamped(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """With its digest as an annotation."""
    digest = hashlib.sha256(json.dumps(wanted, sort_keys=True).encode()).hexdigest()[:32]
    metadata = {**wanted["metadata"]}
    metadata["annotations"] = {**metadata.get("annotations", {}), APPLIED_DIGEST: digest}
    return {**wanted, "metadata": metadata}


def needs_apply(wanted: Mapping[str, Any], live: Mapping[str, Any] | None) -> bool:
    """`wanted` is stamped."""
    return live is None or not _covers(live, wanted)


def _covers(live: Any, wanted: Any, *, is_quantity: bool = False) -> bool:
    """Whether all of `wanted` is in `live`."""
    if isinstance(wanted, Mapping):
        if not isinstance(live, Mapping):
            return not wanted and live is None
        return all(
            _covers(live.get(key), value, is_quantity=is_quantity or key in QUANTITY_FIELDS)
            for key, value in wanted.items()
        )
    if isinstance(wanted, list):
        return _covers_list(live or [], wanted)
    if is_quantity and isinstance(live, str | int) and isinstance(wanted, str | int | float):
        return _amount(live) == _amount(wanted)
    return bool(live == wanted) or (live is None and wanted in ("", False, 0))


def _covers_list(live: Sequence[Any], wanted: Sequence[Any]) -> bool:
    if len(live) == len(wanted) and all(map(_covers, live, wanted)):
        return True
    items = [item for item in (*live, *wanted) if isinstance(item, Mapping)]
    key = next((key for key in LIST_KEYS if items and all(key in item for item in items)), None)
    if key is None or len(items) != len(live) + len(wanted):
        return False
    by_key = {item[key]: item for item in live}
    return all(_covers(by_key.get(item[key]), item) for item in wanted)


def _amount(text: str | float) -> Decimal | str:
    try:
        return amount_of(text)
    except ValueError:
        return str(text)
