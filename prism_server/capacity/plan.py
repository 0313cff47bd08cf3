"""How many KV pages fit on a GPU: memory x fraction - weights - working memory, divided by the bytes of a page.

Pure arithmetic, on paper before anything runs. Operator, server and `prism-plan` do the same sum. Weights and pages are
exact; the working memory is an upper estimate, which a server on its real card replaces by what it measures.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from prism_server.capacity.models import WEIGHT_ELEMENT_BYTES, ModelShape, Switch, WeightDtype
from prism_server.capacity.page_layout import KVDtype, PageLayout
from prism_server.capacity.units import GIB, MIB
from prism_server.errors import StartupError

LOGIT_COPIES = 3
"""Logits, probabilities and their sorted copy, all FP32, while a batch is sampled."""
ENCODED_PATCHES = 16_384
"""Patches that the vision encoder takes in one step, of several pictures together; a single item may have more. As many
as the largest picture of the default limits; larger batches are no faster."""
GRAPH_BYTES = 1152 * MIB
"""An 8B model's graphs took 1,097 MiB of an H200: 59 of steps, and those of the encoder for 13 sizes of batches."""
TENSOR_PARALLEL_SIZES = (2, 4, 8)


def most_encoded_tokens(max_image_tokens: int, max_video_tokens: int, patches_per_token: int) -> int:
    """The most that the vision encoder does at once, in tokens: the largest item of either kind, which is encoded
    whole, or a step's worth of smaller ones. Plans on paper count with it, a start on a GPU measures with it."""
    return max(max_image_tokens, max_video_tokens, ENCODED_PATCHES // patches_per_token)


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is to run, and on what. Bytes and sizes are those of one GPU; the defaults are the server's own."""

    shape: ModelShape
    gpu_memory_bytes: int
    memory_fraction: float = 0.85
    kv_dtype: KVDtype = "fp8"
    page_tokens: int = 64
    weight_dtype: WeightDtype = "bf16"
    fp8_head: Switch = "auto"
    """Whether the LM head has a copy in FP8 beside it; auto: as a server on an NVIDIA GPU decides."""
    tensor_parallel: int = 1
    max_context_tokens: int = 32768
    max_step_tokens: int = 8192
    max_running_sequences: int = 64
    max_image_tokens: int = 4096
    max_video_tokens: int = 12_288
    feature_cache_bytes: int = 1 * GIB
    graph_bytes: int = GRAPH_BYTES
    """For captured CUDA graphs; 0 where there are none."""

    def __post_init__(self) -> None:
        if not 0 < self.memory_fraction <= 1:
            raise StartupError(f"memory fraction {self.memory_fraction} must be above 0 and at most 1")
        sizes = (self.page_tokens, self.max_context_tokens, self.max_step_tokens, self.max_running_sequences)
        if min(self.gpu_memory_bytes, self.max_image_tokens, self.max_video_tokens, *sizes) < 1:
            raise StartupError("GPU memory, page, context, step, sequences, picture and clip must all be at least 1")
        self.shape.check_tensor_parallel(self.tensor_parallel)

    @property
    def has_fp8_head(self) -> bool:
        return self.shape.text.has_fp8_head(self.fp8_head, "triton", self.weight_dtype)

    @property
    def encoded_tokens(self) -> int:
        """The most that the vision encoder does at once, in tokens."""
        return most_encoded_tokens(self.max_image_tokens, self.max_video_tokens, self.shape.vision.patches_per_token)

    @property
    def largest_item(self) -> str:
        """What `encoded_tokens` are, for a person."""
        if self.max_video_tokens == self.encoded_tokens:
            return f"one clip of {self.encoded_tokens:,} tokens"
        one = "one picture" if self.max_image_tokens == self.encoded_tokens else "pictures"
        return f"{one} of {self.encoded_tokens:,} tokens"


@dataclass(frozen=True, slots=True)
class PagePlan:
    """Every term of the sum. `kv_bytes` is what is left for pages; it is negative when the rest alone is too much."""

    request: PlanRequest
    layout: PageLayout
    usable_bytes: int
    weight_bytes: int
    fp8_head_bytes: int
    activation_bytes: int
    encoder_bytes: int
    feature_cache_bytes: int
    graph_bytes: int

    @property
    def model_bytes(self) -> int:
        """What the model itself takes: its weights, and the copy of the LM head where there is one."""
        return self.weight_bytes + self.fp8_head_bytes

    @property
    def reserved_bytes(self) -> int:
        """Everything beside the pages."""
        working = self.activation_bytes + self.encoder_bytes + self.feature_cache_bytes + self.graph_bytes
        return self.model_bytes + working

    @property
    def kv_bytes(self) -> int:
        return self.usable_bytes - self.reserved_bytes

    @property
    def num_pages(self) -> int:
        return self.layout.pages_in(self.kv_bytes)

    @property
    def num_tokens(self) -> int:
        return self.num_pages * self.layout.page_tokens

    @property
    def needed_pages(self) -> int:
        """The least pool that is worth starting with: one request of the longest context."""
        return self.layout.pages_for(self.request.max_context_tokens)

    @property
    def fits(self) -> bool:
        return self.num_pages >= self.needed_pages

    @property
    def least_gpu_memory_bytes(self) -> int:
        """The smallest GPU on which this request fits."""
        needed = self.reserved_bytes + self.needed_pages * self.layout.page_bytes
        return math.ceil(needed / Fraction(self.request.memory_fraction))

    def explain(self) -> str:
        """The sum as a column of figures, for a person; with what would help where it does not fit."""
        request, layout = self.request, self.layout
        ranks = request.tensor_parallel
        share = f", split over {ranks} GPUs" if ranks > 1 else ""
        page_note = f"{layout.page_tokens} tokens of {layout.bytes_per_token:,} bytes"
        step_note = f"a step of {request.max_step_tokens:,} tokens, {request.max_running_sequences:,} sequences"
        contexts = self.num_tokens / request.max_context_tokens
        head = [("- FP8 head", _gib(self.fp8_head_bytes), "a copy of the LM head: model.fp8_head")]
        rows = [
            ("memory of one GPU", _gib(request.gpu_memory_bytes), ""),
            (
                f"x {request.memory_fraction:g} usable",
                _gib(self.usable_bytes),
                "driver and fragmentation keep the rest",
            ),
            ("- weights", _gib(self.weight_bytes), f"{request.weight_dtype}{share}"),
            *(head if request.has_fp8_head else []),
            ("- activations", _gib(self.activation_bytes), step_note),
            ("- vision encoder", _gib(self.encoder_bytes), request.largest_item),
            ("- encoder outputs", _gib(self.feature_cache_bytes), "the feature cache"),
            ("- CUDA graphs", _gib(self.graph_bytes), ""),
            ("= for KV pages", _gib(self.kv_bytes), ""),
            ("/ one page", f"{layout.page_bytes:,} B", page_note),
            ("= pages", f"{self.num_pages:,}", f"{self.num_tokens:,} tokens"),
            ("  contexts", f"{contexts:.1f}", f"of {request.max_context_tokens:,} tokens"),
        ]
        lines = [f"{request.shape.name} with {layout.kv_dtype} KV, tensor parallel {ranks}"]
        lines += [f"  {label:<18} {figure:>14}  {note}".rstrip() for label, figure, note in rows]
        if not self.fits:
            lines += [self.refusal(), *(f"  - {suggestion}" for suggestion in suggestions(request))]
        return "\n".join(lines)

    def refusal(self) -> str:
        """Why it does not fit, in one line with its figures."""
        return (
            f"does not fit: a context of {self.request.max_context_tokens:,} tokens needs {self.needed_pages:,} pages "
            f"({_gib(self.needed_pages * self.layout.page_bytes)}), there is room for {self.num_pages:,} "
            f"({_gib(self.kv_bytes)})"
        )


def plan_pages(request: PlanRequest) -> PagePlan:
    """The page plan of one rank. It may not fit (`PagePlan.fits`); every rank comes to the same numbers."""
    shape, ranks = request.shape, request.tensor_parallel
    return PagePlan(
        request=request,
        layout=shape.page_layout(request.kv_dtype, request.page_tokens, ranks),
        usable_bytes=math.floor(request.gpu_memory_bytes * Fraction(request.memory_fraction)),
        weight_bytes=shape.weight_bytes(request.weight_dtype, ranks),
        fp8_head_bytes=shape.fp8_head_bytes(ranks) if request.has_fp8_head else 0,
        activation_bytes=_activation_bytes(request),
        encoder_bytes=_encoder_bytes(request),
        feature_cache_bytes=request.feature_cache_bytes,
        graph_bytes=request.graph_bytes,
    )


def suggestions(request: PlanRequest) -> Iterator[str]:
    """What would make an unfitting request fit, each tried by the same sum; smaller changes first."""
    plans = {
        "FP8 KV": plan_pages(replace(request, kv_dtype="fp8")),
        "model.fp8_head off, no FP8 copy of the LM head": plan_pages(replace(request, fp8_head="off")),
    }
    if not any(plan.fits for plan in plans.values()):
        plans = {"FP8 KV and model.fp8_head off": plan_pages(replace(request, kv_dtype="fp8", fp8_head="off"))}
    for change, plan in plans.items():
        if plan.fits:
            yield f"{change}: {plan.num_tokens:,} tokens fit"
    if (plan := plan_pages(request)).num_pages:
        yield f"a context of at most {plan.num_tokens:,} tokens"
    for ranks in TENSOR_PARALLEL_SIZES:
        if ranks <= request.tensor_parallel or request.shape.text.num_kv_heads % ranks:
            continue
        split = plan_pages(replace(request, tensor_parallel=ranks))
        if split.fits:
            yield f"tensor parallel over {ranks} such GPUs, not served yet: {split.num_tokens:,} tokens fit"
            break
    yield f"a GPU of at least {_gib(plan.least_gpu_memory_bytes, up=True)}"


def _activation_bytes(request: PlanRequest) -> int:
    """A step's rows at their widest (residual, norm, inner rows of attention or MLP) and the sampler's logits."""
    text, ranks = request.shape.text, request.tensor_parallel
    attention = (2 * text.num_heads + 2 * text.num_kv_heads) * text.head_dim
    inner = max(attention, 3 * text.intermediate_size) // ranks
    row_bytes = (2 * text.hidden_size + inner) * WEIGHT_ELEMENT_BYTES[request.weight_dtype]
    logit_bytes = request.max_running_sequences * text.vocab_size * 4 * LOGIT_COPIES
    return request.max_step_tokens * row_bytes + logit_bytes


def _encoder_bytes(request: PlanRequest) -> int:
    """The largest item in the vision tower: its patches, rows at their widest, and the outputs of every merger.

    Attention is counted without its score matrix: the kernels that serve a GPU never write it out.
    """
    vision, out = request.shape.vision, request.shape.text.hidden_size
    inner = max(4 * vision.hidden_size, 2 * vision.intermediate_size)
    patch_row = vision.patch_values + 2 * vision.hidden_size + inner
    mergers = 1 + len(vision.deepstack_blocks)
    token_row = 2 * vision.patches_per_token * vision.hidden_size + mergers * out
    per_token = vision.patches_per_token * patch_row + token_row
    return request.encoded_tokens * per_token * WEIGHT_ELEMENT_BYTES[request.weight_dtype]


def _gib(num_bytes: int, up: bool = False) -> str:
    """GiB with two digits; `up` never promises less than is needed."""
    hundredths = -(-num_bytes * 100 // GIB) if up else num_bytes * 100 / GIB
    return f"{hundredths / 100:,.2f} GiB"
