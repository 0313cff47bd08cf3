"""The KV plan on paper: pages of an engine pod, from the spec and what is known about the nodes' cards.

The same sum as `prism-plan` and as the pod's own on its real card. It feeds the status and decides whether a workload
may be created or changed; it never reaches a pod template.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from prism_operator.children.config import settings_of
from prism_operator.crd.quantity import quantity_bytes
from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.crd.status import ConditionStatus
from prism_operator.nodes import (
    HOSTNAME_LABEL,
    MEMORY_LABEL,
    SHARING_STRATEGIES,
    STRATEGY_LABEL,
    NodeFacts,
    card_memory_bytes,
    eligible_nodes,
    is_shared,
)
from prism_operator.shapes import shape_of
from prism_server.capacity.models import ModelShape
from prism_server.capacity.page_layout import PageLayout
from prism_server.capacity.plan import PagePlan, PlanRequest, plan_pages, suggestions
from prism_server.capacity.units import GIB, MIB
from prism_server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class KVPlan:
    """What `KVPlanned` says, and the numbers: `pages` and `tokens` are those of one pod on the smallest card that fits,
    None where nothing is planned.

    Reasons: `Planned`; `SomeNodesFit` (True: `suggestion` keeps pods off the eligible nodes that cannot hold
    it); `CPU` (True: no card, the pod sizes its pool); `DoesNotFit`, `SharedGPU` (False); `NoShape`, `NoFacts`
    (Unknown: pods are created, and plan for themselves).
    """

    status: ConditionStatus
    reason: str
    message: str
    pages: int | None = None
    tokens: int | None = None
    max_pages: int | None = None
    """On the largest card that is eligible."""
    suggestion: str = ""

    @property
    def feasible(self) -> bool:
        """Whether a workload may be created from it: only a plan that is known to fail forbids that."""
        return self.status != "False"


@dataclass(frozen=True, slots=True)
class Card:
    """An eligible node with the memory of its card, and the plan on it."""

    node: NodeFacts
    plan: PagePlan


def plan_kv(spec: PrismDeploymentSpec, nodes: Sequence[NodeFacts] | None) -> KVPlan:
    """Pure. `nodes` is None, or empty, where the operator may not see nodes. Raises Refused (`InvalidSettings`,
    `NoShape` for fixed pages of an unknown model) where the spec has no settings to plan with."""
    settings, shape = settings_of(spec), shape_of(spec)
    if shape is None:
        return KVPlan("Unknown", "NoShape", "the source's name tells no known model; set model.shape for a plan")
    if spec.gpu.memory is not None:
        memory_bytes = quantity_bytes(spec.gpu.memory)
        return _on_one_card(spec, plan_pages(_request(spec, settings, shape, memory_bytes)))
    if spec.engine.device == "cpu":
        return _on_cpu(spec, settings, shape)
    return _on_nodes(spec, settings, shape, nodes or ())


def _request(spec: PrismDeploymentSpec, settings: ServerSettings, shape: ModelShape, memory_bytes: int) -> PlanRequest:
    return settings.plan_request(shape, max(memory_bytes, 1), spec.engine.tensor_parallel)


def _fits(spec: PrismDeploymentSpec, plan: PagePlan) -> bool:
    """Fixed pages have to be there; else one request of the longest context has to fit, as the server itself asks.
    In both cases `kv.minTokens` are the least that is worth a pod."""
    has_room = plan.num_pages >= spec.kv.pages if spec.kv.pages else plan.fits
    return has_room and _pages(spec, plan) * plan.layout.page_tokens >= spec.kv.min_tokens


def _pages(spec: PrismDeploymentSpec, plan: PagePlan) -> int:
    return spec.kv.pages or plan.num_pages


def _planned(
    spec: PrismDeploymentSpec, plan: PagePlan, message: str, reason: str = "Planned", largest: PagePlan | None = None
) -> KVPlan:
    pages = _pages(spec, plan)
    return KVPlan(
        "True", reason, message, pages, pages * plan.layout.page_tokens, max_pages=_pages(spec, largest or plan)
    )


def _on_one_card(spec: PrismDeploymentSpec, plan: PagePlan) -> KVPlan:
    if not _fits(spec, plan):
        return _too_small(spec, plan)
    return _planned(spec, plan, _arithmetic(spec, plan))


def _too_small(spec: PrismDeploymentSpec, plan: PagePlan) -> KVPlan:
    suggestion = "; or ".join(_ways_out(spec, plan))
    refusal = plan.refusal()
    if spec.kv.pages > plan.num_pages:
        refusal = f"does not fit: kv.pages asks for {spec.kv.pages:,}, there is room for {plan.num_pages:,}"
        suggestion = f"kv.pages: {plan.num_pages}" if plan.fits else suggestion
    elif spec.kv.pages or plan.fits:
        tokens = _pages(spec, plan) * plan.layout.page_tokens
        refusal = f"does not fit: kv.minTokens asks for {spec.kv.min_tokens:,} tokens, the pages hold {tokens:,}"
        suggestion = f"kv.minTokens: {tokens}"
    message = f"{refusal}. {_arithmetic(spec, plan)}. Try: {suggestion}"
    return KVPlan("False", "DoesNotFit", message, suggestion=suggestion)


def _ways_out(spec: PrismDeploymentSpec, plan: PagePlan) -> list[str]:
    """Suggestions for all that is asked for: a card that holds one long request is too small for `kv.pages`, or for
    `kv.minTokens`, of more."""
    request = plan.request
    least_tokens = max(request.max_context_tokens, spec.kv.pages * plan.layout.page_tokens, spec.kv.min_tokens)
    ways = suggestions(replace(request, max_context_tokens=least_tokens))
    if least_tokens == request.max_context_tokens:
        return list(ways)
    fewer = f"kv.pages: {plan.num_pages}" if spec.kv.pages else f"kv.minTokens: {plan.num_tokens}"
    return [f"{fewer}, with {way}" if way.startswith("a context") else way for way in ways]


def _on_cpu(spec: PrismDeploymentSpec, settings: ServerSettings, shape: ModelShape) -> KVPlan:
    """No card to plan for. A fixed pool is known; else the pod says what it took."""
    layout = shape.page_layout(settings.kv.dtype, settings.kv.page_tokens, spec.engine.tensor_parallel)
    pages = layout.pages_in(settings.kv.memory_bytes)
    if not pages:
        return KVPlan("True", "CPU", "the engine runs on the CPU and sizes its pool itself; set kv.pages to fix it")
    message = f"{pages:,} pages of {layout.page_bytes:,} bytes, as kv.pages says, in the host's memory"
    return KVPlan("True", "CPU", message, pages, pages * layout.page_tokens, max_pages=pages)


def _on_nodes(
    spec: PrismDeploymentSpec, settings: ServerSettings, shape: ModelShape, nodes: Sequence[NodeFacts]
) -> KVPlan:
    resource = spec.gpu.resource_name
    eligible = eligible_nodes(spec, nodes)
    if not eligible:
        seen = f"none of {len(nodes)} nodes has {resource} for this pod" if nodes else "no node is known"
        return KVPlan("Unknown", "NoFacts", f"{seen}; the pod plans on its own card. Set gpu.memory for a plan")
    shared = [node for node in eligible if is_shared(node, resource)]
    if len(shared) == len(eligible):
        return KVPlan(
            "False",
            "SharedGPU",
            "every eligible card is shared (time slices or MPS) and shows its whole memory to each pod; "
            "set gpu.sharing, and gpu.memory to this pod's part",
            suggestion="gpu.memory",
        )
    whole = [node for node in eligible if not is_shared(node, resource)]
    memory = {node.name: card_memory_bytes(node, resource) for node in whole}
    cards = [
        Card(node, plan_pages(_request(spec, settings, shape, num_bytes)))
        for node in whole
        if (num_bytes := memory[node.name]) is not None
    ]
    return _on_cards(spec, eligible, sorted(cards, key=lambda card: card.plan.request.gpu_memory_bytes), len(whole))


def _on_cards(spec: PrismDeploymentSpec, eligible: list[NodeFacts], cards: list[Card], num_whole: int) -> KVPlan:
    """`cards` are the whole ones of known memory, smallest first, of `num_whole`."""
    fitting = [card for card in cards if _fits(spec, card.plan)]
    num_unknown = num_whole - len(cards)
    if not fitting and num_unknown:
        return KVPlan(
            "Unknown",
            "NoFacts",
            f"{num_unknown} of {len(eligible)} eligible nodes say nothing about their cards' memory "
            f"(label {MEMORY_LABEL}); the pod plans on its own card. Set gpu.memory for a plan",
        )
    if not fitting:
        return _too_small(spec, cards[-1].plan)
    smallest, largest = fitting[0].plan, fitting[-1].plan
    message = _arithmetic(spec, smallest)
    if _pages(spec, largest) != _pages(spec, smallest):
        message += f"; up to {_pages(spec, largest):,} pages on the largest card"
    if num_unknown:
        message += f"; {num_unknown} eligible nodes say nothing about their cards' memory"
    if len(fitting) + num_unknown == len(eligible):
        return _planned(spec, smallest, message, largest=largest)
    suggestion = json.dumps(_node_affinity(spec, eligible, cards, fitting))
    message += (
        f". It fits {len(fitting)} of {len(eligible)} eligible nodes; "
        f"to keep pods off the others, podTemplate.affinity: {suggestion}"
    )
    return replace(_planned(spec, smallest, message, "SomeNodesFit", largest), suggestion=suggestion)


def _node_affinity(
    spec: PrismDeploymentSpec, eligible: list[NodeFacts], cards: list[Card], fitting: list[Card]
) -> dict[str, Any]:
    """By the cards' memory where labels say it, so that it holds for nodes to come; else by the nodes' names."""
    resource = spec.gpu.resource_name
    shared = [node for node in eligible if is_shared(node, resource)]
    label = f"{resource}.memory" if "mig-" in resource else MEMORY_LABEL
    expressions: list[dict[str, Any]] = []
    is_split = any(card.node.labels.get(STRATEGY_LABEL) in SHARING_STRATEGIES for card in fitting)
    by_strategy = not shared or (all(STRATEGY_LABEL in node.labels for node in shared) and not is_split)
    if all(label in card.node.labels for card in fitting) and by_strategy:
        too_small = [card for card in cards if card not in fitting]
        if too_small:
            largest_mib = too_small[-1].plan.request.gpu_memory_bytes // MIB
            expressions.append({"key": label, "operator": "Gt", "values": [str(largest_mib)]})
        if shared:
            expressions.append({"key": STRATEGY_LABEL, "operator": "NotIn", "values": [*SHARING_STRATEGIES]})
    else:
        hosts = sorted(card.node.labels.get(HOSTNAME_LABEL, card.node.name) for card in fitting)
        expressions.append({"key": HOSTNAME_LABEL, "operator": "In", "values": hosts})
    required = {"nodeSelectorTerms": [{"matchExpressions": expressions}]}
    return {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}


def _arithmetic(spec: PrismDeploymentSpec, plan: PagePlan) -> str:
    """The sum in one line, every term of it."""
    request, layout = plan.request, plan.layout
    working = plan.reserved_bytes - plan.model_bytes
    head = f"- {_gib(plan.fp8_head_bytes)} FP8 head " if request.has_fp8_head else ""
    line = (
        f"{request.shape.name}, {layout.kv_dtype}, TP {request.tensor_parallel}: "
        f"{_gib(request.gpu_memory_bytes)} GiB x {request.memory_fraction:g} "
        f"- {_gib(plan.weight_bytes)} weights {head}- {_gib(working)} working memory = {_gib(plan.kv_bytes)} GiB"
        f" / {layout.page_bytes:,} bytes = {plan.num_pages:,} pages, {plan.num_tokens:,} tokens"
    )
    return f"{line}; kv.pages fixes {_fixed(spec.kv.pages, layout)}" if spec.kv.pages else line


def _fixed(pages: int, layout: PageLayout) -> str:
    return f"{pages:,} pages, {pages * layout.page_tokens:,} tokens"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:,.2f}"
