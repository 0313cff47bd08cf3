"""`prism-plan`: KV pages and tokens of a model on a GPU, on paper."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import get_args

from prism_server.capacity.models import KNOWN_MODELS, WEIGHT_ELEMENT_BYTES, ModelShape, Switch, resolve_shape
from prism_server.capacity.page_layout import ELEMENT_BYTES, PageLayout
from prism_server.capacity.plan import GRAPH_BYTES, PagePlan, PlanRequest, plan_pages, suggestions
from prism_server.capacity.units import GIB, MIB
from prism_server.cli_support import ArgumentParser, console_script

DOES_NOT_FIT_EXIT_CODE = 1

EPILOG = """examples:
  prism-plan --model 8b --gpu-memory-gib 141             pages and tokens on one GPU, with the arithmetic
  prism-plan --model 8b --kv-dtype bf16 --tokens 28928   what these tokens cost
  prism-plan --model 8b --kv-memory-mib 4096             what this budget holds

exit code: 0; 1 when the plan does not fit; 2 when an argument is wrong"""

RANKS_HELP = "GPUs that share the model: on paper, for engines run on one GPU so far (default: 1)"
DEFAULTS = {field.name: field.default for field in fields(PlanRequest)}


def number_above(least: float, kind: Callable[[str], float]) -> Callable[[str], float]:
    """An argparse type: a number of `kind` of at least `least`, finite."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not least <= value < 2**60:
            raise argparse.ArgumentTypeError(f"{text!r} must be at least {least:g} and below 2^60")
        return value

    return parse


COUNT = number_above(1, int)
SIZE = number_above(0, float)


def build_parser() -> ArgumentParser:
    parser = ArgumentParser("prism-plan", "How many KV pages fit, and what a token costs.", EPILOG)
    add = parser.add_argument
    add("--model", default="8b", help=f"{', '.join(KNOWN_MODELS)} or a directory with a config.json (default: 8b)")
    add("--kv-dtype", choices=list(ELEMENT_BYTES), default=DEFAULTS["kv_dtype"], help="default: %(default)s")
    add("--page-tokens", type=COUNT, default=DEFAULTS["page_tokens"], metavar="N", help="default: %(default)s")
    add("--tensor-parallel", type=COUNT, default=1, metavar="N", help=RANKS_HELP)
    add("--json", action="store_true", help="one JSON object instead of text")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--gpu-memory-gib", type=SIZE, metavar="GIB", help="plan the pages of a GPU of this size")
    what.add_argument("--kv-memory-mib", type=SIZE, metavar="MIB", help="convert a budget per GPU to tokens")
    what.add_argument("--tokens", type=COUNT, metavar="N", help="convert tokens to bytes per GPU")
    gpu = parser.add_argument_group("with --gpu-memory-gib")
    gpu.add_argument("--memory-fraction", type=SIZE, default=DEFAULTS["memory_fraction"], help="default: %(default)s")
    gpu.add_argument(
        "--weight-dtype",
        choices=list(WEIGHT_ELEMENT_BYTES),
        default=DEFAULTS["weight_dtype"],
        help="default: %(default)s",
    )
    gpu.add_argument(
        "--fp8-head",
        choices=get_args(Switch),
        default=DEFAULTS["fp8_head"],
        help="count the LM head's FP8 copy, as with model.fp8_head; auto: with bf16 weights (default: %(default)s)",
    )
    lengths = ("max_context_tokens", "max_step_tokens", "max_running_sequences", "max_image_tokens", "max_video_tokens")
    for name in lengths:
        flag = f"--{name.replace('_', '-')}"
        gpu.add_argument(flag, type=COUNT, default=DEFAULTS[name], metavar="N", help="default: %(default)s")
    gpu.add_argument("--feature-cache-mib", type=SIZE, default=1024, metavar="MIB", help="default: %(default)s")
    graph_mib = GRAPH_BYTES // MIB
    gpu.add_argument(
        "--graph-mib", type=SIZE, default=graph_mib, metavar="MIB", help="CUDA graphs (default: %(default)s)"
    )
    return parser


def plan_from(arguments: argparse.Namespace, shape: ModelShape) -> PagePlan:
    return plan_pages(
        PlanRequest(
            shape=shape,
            gpu_memory_bytes=int(arguments.gpu_memory_gib * GIB),
            memory_fraction=arguments.memory_fraction,
            kv_dtype=arguments.kv_dtype,
            page_tokens=arguments.page_tokens,
            weight_dtype=arguments.weight_dtype,
            fp8_head=arguments.fp8_head,
            tensor_parallel=arguments.tensor_parallel,
            max_context_tokens=arguments.max_context_tokens,
            max_step_tokens=arguments.max_step_tokens,
            max_running_sequences=arguments.max_running_sequences,
            max_image_tokens=arguments.max_image_tokens,
            max_video_tokens=arguments.max_video_tokens,
            feature_cache_bytes=int(arguments.feature_cache_mib * MIB),
            graph_bytes=int(arguments.graph_mib * MIB),
        )
    )


def plan_facts(plan: PagePlan) -> dict[str, object]:
    """The plan as JSON: every term in bytes of one GPU."""
    return {
        **layout_facts(plan.request.shape, plan.layout),
        "gpu_memory_bytes": plan.request.gpu_memory_bytes,
        "memory_fraction": plan.request.memory_fraction,
        "usable_bytes": plan.usable_bytes,
        "weight_bytes": plan.weight_bytes,
        "fp8_head_bytes": plan.fp8_head_bytes,
        "activation_bytes": plan.activation_bytes,
        "encoder_bytes": plan.encoder_bytes,
        "feature_cache_bytes": plan.feature_cache_bytes,
        "graph_bytes": plan.graph_bytes,
        "kv_bytes": plan.kv_bytes,
        "pages": plan.num_pages,
        "tokens": plan.num_tokens,
        "fits": plan.fits,
        "suggestions": [] if plan.fits else list(suggestions(plan.request)),
    }


def layout_facts(shape: ModelShape, layout: PageLayout) -> dict[str, object]:
    return {
        "model": shape.name,
        "parameters": shape.num_parameters(),
        "kv_dtype": layout.kv_dtype,
        "page_tokens": layout.page_tokens,
        "kv_heads_per_gpu": layout.num_kv_heads,
        "bytes_per_token": layout.bytes_per_token,
        "page_bytes": layout.page_bytes,
    }


def conversion(arguments: argparse.Namespace, shape: ModelShape) -> tuple[dict[str, object], str]:
    """Tokens to bytes, or a budget to tokens: as facts and as text. Whole pages only."""
    layout = shape.page_layout(arguments.kv_dtype, arguments.page_tokens, arguments.tensor_parallel)
    if arguments.tokens is not None:
        pages = layout.pages_for(arguments.tokens)
        asked = f"{arguments.tokens:,} tokens"
    else:
        pages = layout.pages_in(int(arguments.kv_memory_mib * MIB))
        asked = f"{arguments.kv_memory_mib:,g} MiB"
    tokens, num_bytes = pages * layout.page_tokens, pages * layout.page_bytes
    facts = {**layout_facts(shape, layout), "pages": pages, "tokens": tokens, "kv_bytes": num_bytes}
    text = (
        f"{shape.name} with {layout.kv_dtype} KV: {layout.bytes_per_token:,} bytes a token, "
        f"{layout.page_bytes:,} a page of {layout.page_tokens}\n"
        f"{asked}: {pages:,} pages, {tokens:,} tokens, {num_bytes:,} bytes = {num_bytes / MIB:,.4f} MiB"
    )
    return facts, text


@console_script("prism-plan")
def main(argv: Sequence[str]) -> int:
    arguments = build_parser().parse_strictly(argv)
    shape = resolve_shape(arguments.model)
    if arguments.gpu_memory_gib is None:
        facts, text = conversion(arguments, shape)
        print(json.dumps(facts) if arguments.json else text)
        return 0
    plan = plan_from(arguments, shape)
    print(json.dumps(plan_facts(plan)) if arguments.json else plan.explain())
    return 0 if plan.fits else DOES_NOT_FIT_EXIT_CODE
