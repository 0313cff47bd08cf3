"""What a plan that does not fit suggests, and whose cards are shared."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from deployments import HUB, deployment, merged

from prism_operator.nodes import NodeFacts, is_shared
from prism_operator.plan import KVPlan, plan_kv

SLICE = "nvidia.com/mig-3g.40gb"
CARD = "nvidia.com/gpu"


def plan(nodes: list[NodeFacts] | None = None, **change: Any) -> KVPlan:
    return plan_kv(deployment(merged(HUB, change)).spec, nodes)


@pytest.mark.parametrize("kv", [{"pages": 100_000}, {"minTokens": 6_000_000}, {"pages": 100_000, "dtype": "bf16"}])
def test_a_card_that_is_suggested_holds_all_that_is_asked_for(kv: dict[str, Any]) -> None:
    refused = plan(gpu={"memory": "20Gi"}, kv=kv)
    assert refused.reason == "DoesNotFit"
    card = re.search(r"a GPU of at least ([\d,.]+) GiB", refused.message)
    assert card is not None
    gib = float(card[1].replace(",", ""))
    assert plan(gpu={"memory": f"{gib}Gi"}, kv=kv).reason == "Planned"
    assert plan(gpu={"memory": f"{gib * 0.98:.2f}Gi"}, kv=kv).reason == "DoesNotFit"


def test_a_shorter_context_is_suggested_with_the_pages_that_go_with_it() -> None:
    tight: dict[str, Any] = {"gpu": {"memory": "26Gi"}, "engine": {"maxContextTokens": 262144}}
    refused = plan(**tight, kv={"pages": 100_000})
    way = re.search(r"kv\.pages: (\d+), with a context of at most ([\d,]+) tokens", refused.message)
    assert way is not None, refused.message
    taken = {**tight, "engine": {"maxContextTokens": int(way[2].replace(",", ""))}}
    assert plan(**taken, kv={"pages": int(way[1])}).reason == "Planned"


def sliced(name: str, replicas: str, strategy: str = "time-slicing") -> NodeFacts:
    """A node with slices beside whole cards (MIG strategy mixed)."""
    labels = {
        "nvidia.com/gpu.sharing-strategy": strategy,
        f"{SLICE}.replicas": replicas,
        f"{SLICE}.memory": "40192",
        "kubernetes.io/hostname": name,
    }
    return NodeFacts(name, True, labels, {SLICE: 2, CARD: 8})


def test_slices_are_shared_when_their_own_label_says_so() -> None:
    whole, shared = sliced("a", "1"), sliced("b", "4", "")
    assert (is_shared(whole, SLICE), is_shared(whole, CARD)) == (False, True)
    assert is_shared(shared, SLICE)
    gpu = {"resourceName": SLICE}
    assert plan([whole], gpu=gpu).reason == "Planned"
    assert plan([shared], gpu=gpu).reason == "SharedGPU"


@pytest.mark.parametrize("strategy", ["time-slicing", "mps", "none"])
def test_the_affinity_to_paste_keeps_slices_that_are_whole_on_nodes_that_share_other_cards(strategy: str) -> None:
    nodes, gpu = [sliced("a", "1", strategy), sliced("b", "4")], {"resourceName": SLICE}
    found = plan(nodes, gpu=gpu)
    assert found.reason == "SomeNodesFit"
    pasted = plan(nodes, gpu=gpu, podTemplate={"affinity": json.loads(found.suggestion)})
    assert pasted.reason == "Planned"
