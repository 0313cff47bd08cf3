"""What an engine pod may come to take of its host's memory: the request where the spec names none.

A sum over the settings: every cache on the host at its full size, and the work that is bounded. It is part of the pod
template, so another sum is another template version.
"""

from __future__ import annotations

from dataclasses import replace

from prism_operator.children.config import settings_of
from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.shapes import shape_of
from prism_server.capacity.models import KNOWN_MODELS, WeightDtype
from prism_server.capacity.plan import plan_pages
from prism_server.settings import ServerSettings

PROCESS_BYTES = 1 << 30
"""The interpreter, torch and its libraries, tables and tokenizer."""
SHARED_MEMORY_BYTES = 1 << 30
"""`/dev/shm` for the ranks of tensor parallelism; Kubernetes gives 64 MiB, in which NCCL does not start."""
DECODER_BYTES = 256 << 20
"""Of one decoding thread: a 4K clip's decoder with its reference frames, or a picture of some 60 megapixels beside its
smaller copy. Frames are decoded one after the other, however long the clip is."""
MOST_DEFAULT_WORKERS = 8
"""Of decoding threads, where the settings name no number: the pod takes one a core up to this."""
CPU_POOL_BYTES = 1 << 30
"""Pages of an engine on the CPU, where the settings name no size."""


def shared_memory_bytes(spec: PrismDeploymentSpec) -> int:
    return SHARED_MEMORY_BYTES if spec.engine.tensor_parallel > 1 else 0


def engine_memory_bytes(spec: PrismDeploymentSpec, template_version: int) -> int:
    """Bytes to ask for. Raises Refused where the spec has no settings to count with."""
    settings = settings_of(spec)
    caches = settings.kv.host_bytes + settings.media.cache_bytes
    on_cpu = _bytes_without_a_card(spec, settings, template_version) if spec.engine.device == "cpu" else 0
    return PROCESS_BYTES + shared_memory_bytes(spec) + caches + _bytes_under_way(settings) + on_cpu


def _bytes_under_way(settings: ServerSettings) -> int:
    """Of media: one in each decoding thread, with its patches; a request of the largest size as it comes in, its body
    beside the media taken out of it; with links what they lead to, and what is kept of it."""
    media, fetch = settings.media, settings.fetch
    vision = KNOWN_MODELS["8b"].vision  # every released model cuts alike
    patches = max(media.max_image_tokens, media.max_video_tokens) * vision.patches_per_token
    decoding = (media.workers or MOST_DEFAULT_WORKERS) * (DECODER_BYTES + patches * vision.patch_values)
    links = fetch.cache_bytes + fetch.max_request_bytes if fetch.hosts else 0
    return decoding + 2 * settings.http.max_body_bytes + links


def _bytes_without_a_card(spec: PrismDeploymentSpec, settings: ServerSettings, template_version: int) -> int:
    """What a card would hold; a model whose shape is not known is left out."""
    pools = (settings.kv.memory_bytes or CPU_POOL_BYTES) + settings.engine.feature_cache_bytes
    shape = shape_of(spec)
    if shape is None:
        return pools
    weights: WeightDtype = "bf16" if settings.model.dtype == "bfloat16" else "fp32"
    plan = plan_pages(replace(settings.plan_request(shape, gpu_memory_bytes=1), weight_dtype=weights))
    if template_version == 2:  # the FP8 copy of the LM head was left out
        return pools + plan.weight_bytes
    return pools + plan.model_bytes
