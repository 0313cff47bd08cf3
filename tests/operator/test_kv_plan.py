"""The KV plan over cards, sharing and models; its numbers are those of `prism-plan`."""

from __future__ import annotations

import json
from typing import Any

import pytest
from deployments import DEMO, HUB, deployment, merged

from prism_operator.children.config import settings_of
from prism_operator.nodes import NodeFacts, Taint, card_memory_bytes, is_shared
from prism_operator.plan import KVPlan, plan_kv
from prism_operator.refused import Refused
from prism_server.capacity import cli as prism_plan
from prism_server.capacity.models import KNOWN_MODELS, Switch, WeightDtype
from prism_server.capacity.plan import PlanRequest, plan_pages

MIB, GIB = 1 << 20, 1 << 30
GPU = "nvidia.com/gpu"
MEMORY = "nvidia.com/gpu.memory"
PRODUCT = "nvidia.com/gpu.product"

CARDS_MIB = {"RTX 5090": 32607, "A100 40": 40960, "A100 80": 81920, "H100": 81559, "H200": 143771}


def node(
    name: str = "n", memory_mib: int | None = None, count: int = 2, resource: str = GPU, **labels: str
) -> NodeFacts:
    said = {"kubernetes.io/hostname": name, **{key.replace("__", "/"): value for key, value in labels.items()}}
    if memory_mib is not None:
        said[MEMORY] = str(memory_mib)
    return NodeFacts(name, True, said, {resource: count})


def product(name: str) -> NodeFacts:
    return NodeFacts("n", True, {PRODUCT: name}, {GPU: 1})


def plan(nodes: list[NodeFacts] | None, base: dict[str, Any] = HUB, **change: Any) -> KVPlan:
    return plan_kv(deployment(merged(base, change)).spec, nodes)


def verdict(found: KVPlan) -> tuple[str, str]:
    return found.status, found.reason


@pytest.mark.parametrize("dtype", ["fp8", "bf16"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("model", ["2b", "4b", "8b", "32b"])
@pytest.mark.parametrize("card", CARDS_MIB)
def test_pages_are_those_of_the_capacity_plan(card: str, model: str, ranks: int, dtype: Any) -> None:
    found = plan(
        [node(memory_mib=CARDS_MIB[card])],
        model={"shape": model},
        engine={"tensorParallel": ranks},
        kv={"dtype": dtype},
    )
    paper = plan_pages(PlanRequest(KNOWN_MODELS[model], CARDS_MIB[card] * MIB, kv_dtype=dtype, tensor_parallel=ranks))
    assert found.feasible == paper.fits
    assert found.status == ("True" if paper.fits else "False")
    if paper.fits:
        assert (found.pages, found.tokens) == (paper.num_pages, paper.num_tokens)
        assert f"{paper.num_pages:,} pages" in found.message
    else:
        assert found.reason == "DoesNotFit"
        assert "a GPU of at least" in found.suggestion


def test_some_of_the_table_fits_and_some_does_not() -> None:
    fits = {
        (card, model): plan([node(memory_mib=mib)], model={"shape": model}).feasible
        for card, mib in CARDS_MIB.items()
        for model in ("2b", "4b", "8b", "32b")
    }
    assert fits["RTX 5090", "8b"]
    assert not fits["RTX 5090", "32b"]
    assert not fits["A100 40", "32b"]
    assert fits["H200", "32b"]


def test_the_plan_agrees_with_prism_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert prism_plan.main(["--model", "8b", "--gpu-memory-gib", "141", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    found = plan(None, gpu={"memory": "141Gi"})
    assert (found.pages, found.tokens) == (printed["pages"], printed["tokens"])


def test_settings_of_the_spec_and_overrides_reach_the_sum() -> None:
    change = {"engine": {"maxRunningSequences": 256, "overrides": {"engine": {"feature_cache_bytes": 8 * GIB}}}}
    request = PlanRequest(
        KNOWN_MODELS["8b"], 80 * GIB, memory_fraction=0.5, max_running_sequences=256, feature_cache_bytes=8 * GIB
    )
    found = plan(None, gpu={"memory": "80Gi"}, kv={"memoryFractionPercent": 50}, **change)
    assert found.pages == plan_pages(request).num_pages


@pytest.mark.parametrize(
    ("model", "copied"),
    [
        ({}, True),
        ({"fp8_head": "auto"}, True),
        ({"fp8_head": True}, True),
        ({"fp8_head": False}, False),
        ({"fp8_head": "off"}, False),
        ({"backend": "flashinfer"}, False),
        ({"dtype": "float32"}, False),
    ],
)
def test_a_copy_of_the_head_is_a_term_of_the_sum(model: dict[str, Any], copied: bool) -> None:
    spec = deployment(merged(HUB, {"gpu": {"memory": "80Gi"}, "engine": {"overrides": {"model": model}}})).spec
    found, settings = plan_kv(spec, None), settings_of(spec)
    weights: WeightDtype = "fp32" if settings.model.dtype == "float32" else "bf16"
    switch: Switch = "on" if copied else "off"
    paper = PlanRequest(KNOWN_MODELS["8b"], 80 * GIB, fp8_head=switch, weight_dtype=weights)
    assert found.pages == plan_pages(paper).num_pages
    assert ("weights - 0.58 FP8 head - " in found.message) == copied
    assert ("FP8 head" in found.message) == copied


def test_a_card_that_only_the_heads_copy_is_too_large_for_is_refused_with_the_way_out() -> None:
    least = plan_pages(PlanRequest(KNOWN_MODELS["8b"], GIB, fp8_head="off")).least_gpu_memory_bytes
    card = {"memory": str(least)}
    refused = plan(None, gpu=card)
    assert (refused.reason, refused.feasible) == ("DoesNotFit", False)
    assert refused.suggestion.startswith("model.fp8_head off")
    assert plan(None, gpu=card, engine={"overrides": {"model": {"fp8_head": "off"}}}).feasible


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("NVIDIA-GeForce-RTX-5090", 32607),
        ("NVIDIA-A100-SXM4-40GB", 40536),
        ("NVIDIA-A100-PCIE-40GB", 40536),
        ("NVIDIA-A100-SXM4-80GB", 81920),
        ("NVIDIA-A100-80GB-PCIe", 81920),
        ("NVIDIA-H100-80GB-HBM3", 81559),
        ("NVIDIA-H100-NVL", 95830),
        ("NVIDIA-H200", 143771),
        ("NVIDIA-L4", 23034),
        ("NVIDIA-L40S", 46068),
        ("Tesla-T4", 15360),
        ("NVIDIA-A100-SXM4-40GB-MIG-3g.20gb", 20 * 973),
    ],
)
def test_without_the_label_the_products_name_says_the_memory(name: str, mib: int) -> None:
    assert card_memory_bytes(product(name), GPU) == mib * MIB


@pytest.mark.parametrize("name", ["", "NVIDIA-Z9000", "NVIDIA-H2000"])
def test_an_unknown_product_says_nothing(name: str) -> None:
    assert card_memory_bytes(product(name), GPU) is None


@pytest.mark.parametrize("text", ["0", "", "many", "-5"])
def test_a_label_that_says_nothing_falls_back_to_the_product(text: str) -> None:
    labels = {MEMORY: text, PRODUCT: "NVIDIA-H200"}
    assert card_memory_bytes(NodeFacts("n", True, labels, {GPU: 1}), GPU) == 143771 * MIB


def test_a_mig_slice_is_planned_by_its_own_label_and_else_by_its_name() -> None:
    resource = "nvidia.com/mig-3g.40gb"
    named = node(resource=resource, memory_mib=81920)
    labelled = node(resource=resource, memory_mib=81920, **{"nvidia.com__mig-3g.40gb.memory": "40192"})
    gpu = {"resourceName": resource}
    assert card_memory_bytes(labelled, resource) == 40192 * MIB
    assert card_memory_bytes(named, resource) == 40 * 973 * MIB
    by_label, by_name = (plan([each], gpu=gpu).pages or 0 for each in (labelled, named))
    assert 0 < by_name <= by_label == plan_pages(PlanRequest(KNOWN_MODELS["8b"], 40192 * MIB)).num_pages


@pytest.mark.parametrize(
    "labels",
    [
        {"nvidia.com__gpu.sharing-strategy": "time-slicing"},
        {"nvidia.com__gpu.sharing-strategy": "mps", "nvidia.com__gpu.replicas": "4"},
        {"nvidia.com__gpu.replicas": "2"},
        {"nvidia.com__gpu.product": "NVIDIA-H200-SHARED"},
    ],
)
def test_a_shared_card_needs_an_explicit_memory(labels: dict[str, str]) -> None:
    shared = node(memory_mib=143771, **labels)
    refused = plan([shared])
    assert (refused.status, refused.reason, refused.feasible) == ("False", "SharedGPU", False)
    explicit = plan([shared], gpu={"sharing": "time-slicing", "memory": "48Gi"})
    assert explicit.pages == plan_pages(PlanRequest(KNOWN_MODELS["8b"], 48 * GIB)).num_pages


def test_a_card_that_says_it_is_not_shared_is_not() -> None:
    labels = {"nvidia.com__gpu.sharing-strategy": "none", "nvidia.com__gpu.replicas": "1"}
    assert not is_shared(node(memory_mib=143771, **labels), GPU)


@pytest.mark.parametrize(
    "others",
    [
        [node("small", 24564)],
        [node("small", 24564), node("tiny", 15360)],
        [node("sliced", 143771, **{"nvidia.com__gpu.sharing-strategy": "time-slicing"})],
        [node("sliced", 143771, **{"nvidia.com__gpu.product": "NVIDIA-H200-SHARED"})],
        [node("small", 24564), node("sliced", 143771, **{"nvidia.com__gpu.sharing-strategy": "mps"})],
    ],
    ids=["small", "two small", "time-sliced", "shared by name", "small and shared"],
)
@pytest.mark.parametrize("labelled", [True, False])
def test_some_nodes_fit_and_the_affinity_to_paste_keeps_pods_on_them(others: list[NodeFacts], labelled: bool) -> None:
    large = node("large", 143771) if labelled else node("large", **{"nvidia.com__gpu.product": "NVIDIA-H200"})
    nodes = [*others, large, node("middle", 81559)]
    found = plan(nodes)
    assert (found.status, found.reason) == ("True", "SomeNodesFit")
    assert found.pages == plan_pages(PlanRequest(KNOWN_MODELS["8b"], 81559 * MIB)).num_pages
    assert found.max_pages == plan_pages(PlanRequest(KNOWN_MODELS["8b"], 143771 * MIB)).num_pages
    assert found.suggestion in found.message
    pasted = plan(nodes, podTemplate={"affinity": json.loads(found.suggestion)})
    assert (pasted.status, pasted.reason) == ("True", "Planned")
    assert (pasted.pages, pasted.max_pages) == (found.pages, found.max_pages)


def test_nothing_fits_only_where_no_eligible_node_does() -> None:
    assert not plan([node("a", 15360), node("b", 23034)]).feasible
    assert plan([node("a", 15360), node("b", 81559)]).feasible


def test_refusals_carry_the_arithmetic_and_a_suggestion() -> None:
    refused = plan([node(memory_mib=23034)])
    assert "8b, fp8, TP 1: 22.49 GiB x 0.85 - 16.33 weights" in refused.message
    assert refused.suggestion in refused.message


@pytest.mark.parametrize("nodes", [None, [], [node()], [node(memory_mib=81559, resource="amd.com/gpu")]])
def test_without_facts_the_plan_is_unknown_and_pods_may_be_made(nodes: list[NodeFacts] | None) -> None:
    found = plan(nodes)
    assert (found.status, found.reason, found.feasible) == ("Unknown", "NoFacts", True)
    assert "gpu.memory" in found.message


def test_a_node_of_unknown_memory_beside_a_small_one_refuses_nothing() -> None:
    assert verdict(plan([node("small", 15360), node("unknown")])) == ("Unknown", "NoFacts")
    assert verdict(plan([node("large", 81559), node("unknown")])) == ("True", "Planned")


def test_a_model_that_no_name_tells_is_unknown() -> None:
    mine = {"model": {"source": {"pvc": {"claimName": "mine"}}}}
    assert verdict(plan([node(memory_mib=81559)], mine)) == ("Unknown", "NoShape")
    assert plan([node(memory_mib=81559)], mine, model={"shape": "4b"}).pages
    named = {"model": {"source": {"pvc": {"claimName": "mine", "path": "Qwen3-VL-4B-Thinking"}}}}
    assert plan([node(memory_mib=81559)], named) == plan([node(memory_mib=81559)], mine, model={"shape": "4b"})


def test_a_mixture_of_experts_is_not_taken_for_a_dense_model() -> None:
    moe = {"model": {"source": {"huggingFace": {"repository": "Qwen/Qwen3-VL-30B-A3B-Instruct"}}}}
    assert plan([node(memory_mib=81559)], moe).reason == "NoShape"


@pytest.mark.parametrize(
    ("change", "planned"),
    [
        ({"nodeSelector": {"pool": "a"}}, True),
        ({"nodeSelector": {"pool": "b"}}, False),
        ({"tolerations": []}, True),
    ],
)
def test_selectors_decide_which_nodes_count(change: dict[str, Any], planned: bool) -> None:
    assert (plan([node(memory_mib=81559, pool="a")], podTemplate=change).status == "True") == planned


@pytest.mark.parametrize(
    ("expression", "planned"),
    [
        ({"key": "pool", "operator": "In", "values": ["a", "b"]}, True),
        ({"key": "pool", "operator": "NotIn", "values": ["a"]}, False),
        ({"key": "zone", "operator": "NotIn", "values": ["a"]}, True),
        ({"key": "pool", "operator": "Exists"}, True),
        ({"key": "pool", "operator": "DoesNotExist"}, False),
        ({"key": MEMORY, "operator": "Gt", "values": ["81558"]}, True),
        ({"key": MEMORY, "operator": "Gt", "values": ["81559"]}, False),
        ({"key": MEMORY, "operator": "Lt", "values": ["81560"]}, True),
    ],
)
def test_required_node_affinity_decides_which_nodes_count(expression: dict[str, Any], planned: bool) -> None:
    required = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}}
    found = plan([node(memory_mib=81559, pool="a")], podTemplate={"affinity": affinity})
    assert (found.status == "True") == planned


@pytest.mark.parametrize(
    ("taint", "tolerations", "planned"),
    [
        (Taint("team", "x", "NoSchedule"), [], False),
        (Taint("team", "x", "NoSchedule"), [{"key": "team", "operator": "Equal", "value": "x"}], True),
        (Taint("team", "x", "NoSchedule"), [{"key": "team", "operator": "Equal", "value": "y"}], False),
        (Taint("team", "x", "NoExecute"), [{"key": "team", "operator": "Exists", "effect": "NoSchedule"}], False),
        (Taint("team", "x", "NoSchedule"), [{"operator": "Exists"}], True),
        (Taint("team", "x", "PreferNoSchedule"), [], True),
        (Taint("node.kubernetes.io/unschedulable", "", "NoSchedule"), [], True),
        (Taint(GPU, "present", "NoSchedule"), [], True),
    ],
)
def test_taints_without_toleration_keep_a_node_out(taint: Taint, tolerations: list[Any], planned: bool) -> None:
    tainted = NodeFacts("n", True, {MEMORY: "81559"}, {GPU: 1}, (taint,))
    assert (plan([tainted], podTemplate={"tolerations": tolerations}).status == "True") == planned


def test_tensor_parallel_needs_its_cards_on_one_node() -> None:
    both = {"engine": {"tensorParallel": 2}}
    assert plan([node("one", 81559, count=1)], **both).reason == "NoFacts"
    assert plan([node("two", 81559, count=2)], **both).reason == "Planned"


def test_fixed_pages_are_the_plan_where_the_card_holds_them() -> None:
    fixed = plan([node(memory_mib=81559)], kv={"pages": 600})
    assert (fixed.pages, fixed.tokens, fixed.max_pages) == (600, 600 * 64, 600)
    refused = plan([node(memory_mib=81559)], kv={"pages": 20_000})
    assert (refused.reason, refused.feasible) == ("DoesNotFit", False)
    assert refused.suggestion == f"kv.pages: {plan([node(memory_mib=81559)]).pages}"


def test_a_card_that_holds_fewer_than_the_least_tokens_is_not_eligible() -> None:
    small, large = node("small", 40536), node("large", 143771)
    tokens = plan([small]).tokens or 0
    assert plan([small], kv={"minTokens": tokens}).reason == "Planned"
    refused = plan([small], kv={"minTokens": tokens + 1})
    assert (refused.reason, refused.suggestion) == ("DoesNotFit", f"kv.minTokens: {tokens}")
    assert f"asks for {tokens + 1:,} tokens, the pages hold {tokens:,}" in refused.message
    assert plan([small, large], kv={"minTokens": tokens + 1}).reason == "SomeNodesFit"
    assert plan(None, gpu={"memory": "40536Mi"}, kv={"minTokens": tokens + 1}).reason == "DoesNotFit"


def test_no_least_tokens_make_room_for_a_context_that_does_not_fit() -> None:
    tight: dict[str, Any] = {"engine": {"maxContextTokens": 32768}, "gpu": {"memory": "24Gi"}}
    assert plan(None, **tight, kv={"minTokens": 1}).message == plan(None, **tight).message
    assert plan(None, **tight).reason == "DoesNotFit"


def test_fixed_pages_must_hold_the_least_tokens() -> None:
    card = [node(memory_mib=81559)]
    assert plan(card, kv={"pages": 600, "minTokens": 600 * 64}).reason == "Planned"
    assert plan(card, kv={"pages": 600, "minTokens": 600 * 64 + 1}).suggestion == "kv.minTokens: 38400"


def test_a_pod_plans_with_the_same_part_of_a_shared_card_as_the_operator() -> None:
    spec = deployment(merged(HUB, {"gpu": {"sharing": "time-slicing", "memory": "40Gi"}})).spec
    settings = settings_of(spec)
    request = PlanRequest(KNOWN_MODELS["8b"], settings.kv.gpu_memory_bytes, settings.kv.memory_fraction)
    assert plan_kv(spec, None).pages == plan_pages(request).num_pages


def test_on_the_cpu_the_host_decides_unless_pages_or_memory_are_given() -> None:
    assert verdict(plan(None, DEMO)) == ("True", "CPU")
    assert plan(None, DEMO).pages is None
    assert plan(None, DEMO, kv={"pages": 64}).pages == 64
    beside = plan([node(memory_mib=81559)], DEMO, gpu={"memory": "32Gi"})
    assert beside.pages == plan_pages(PlanRequest(KNOWN_MODELS["demo"], 32 * GIB, fp8_head="off")).num_pages


def test_settings_that_no_engine_starts_with_are_refused() -> None:
    with pytest.raises(Refused, match="no such option"):
        plan(None, engine={"overrides": {"engine": {"x": 1}}})


@pytest.mark.parametrize(
    "affinity",
    [
        "west",
        {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchExpressions": [{}]}]}},
        {
            "requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [{"key": MEMORY, "operator": "Gt", "values": ["x"]}]}]
            }
        },
    ],
)
def test_an_affinity_that_cannot_be_read_is_refused(affinity: Any) -> None:
    with pytest.raises(Refused, match="nodeAffinity"):
        plan([node(memory_mib=81559)], podTemplate={"affinity": {"nodeAffinity": affinity}})


def test_facts_are_read_from_the_api_servers_node() -> None:
    body = {
        "metadata": {"name": "n1", "labels": {MEMORY: "81559"}},
        "spec": {"taints": [{"key": "k", "effect": "NoSchedule"}]},
        "status": {
            "allocatable": {"cpu": "8", "memory": "16Gi", GPU: "4", "ephemeral-storage": "1"},
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    facts = NodeFacts.from_object(body)
    assert facts == NodeFacts("n1", True, {MEMORY: "81559"}, {GPU: 4}, (Taint("k", "", "NoSchedule"),))
    assert NodeFacts.from_object({"metadata": {"name": "bare"}}) == NodeFacts("bare", False)
