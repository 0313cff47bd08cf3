"""From engines that users call to routers that they call: a release without routers may have made the Service. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from prism_operator.apply import ChildKey
from prism_operator.children import names
from prism_operator.intent import Intent
from prism_operator.routers import leads_to_engines


def hand_over(intent: Intent, live: Mapping[ChildKey, Mapping[str, Any]]) -> Intent:
    """A Service that leads to engines leads there until a router is ready, and the engines' policy lets users in until
    the Service leads elsewhere: nobody who is served loses that because the operator is a newer one."""
    if intent.children is None or intent.deployment is None:
        return intent
    if not leads_to_engines(live.get(("Service", names.service(intent.deployment)))):
        return intent
    kept: dict[ChildKey, str] = {("NetworkPolicy", names.engine(intent.deployment)): "ingress"}
    routers = live.get(("Deployment", names.router(intent.deployment)), {})
    if not routers.get("status", {}).get("readyReplicas"):
        kept["Service", names.service(intent.deployment)] = "selector"
    return replace(intent, children=[_with_kept(child, live, kept) for child in intent.children])


def _with_kept(
    child: dict[str, Any], live: Mapping[ChildKey, Mapping[str, Any]], kept: Mapping[ChildKey, str]
) -> dict[str, Any]:
    key = (child["kind"], child["metadata"]["name"])
    there = live.get(key, {}).get("spec", {})
    if key not in kept or kept[key] not in there:
        return child
    return {**child, "spec": {**child["spec"], kept[key]: there[kept[key]]}}
