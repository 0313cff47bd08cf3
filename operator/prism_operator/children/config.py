"""The engine's configuration: what the spec says in the words of `prism-serve --config`, and its ConfigMap."""

from __future__ import annotations

import json
import posixpath
from typing import Any

from prism_operator.children import names
from prism_operator.children.labels import child
from prism_operator.children.overrides import Config, Overrides
from prism_operator.crd.media import LinksSpec
from prism_operator.crd.quantity import quantity_bytes
from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.deployment import Deployment
from prism_operator.refused import Refused
from prism_operator.shapes import shape_of
from prism_server import __version__
from prism_server.settings import ServerSettings

MIN_BODY_BYTES = 128 << 20

SPEC_FIELDS = {
    "model.path": "model.source",
    "model.revision": "model.revision",
    "model.served_name": "model.servedName",
    "model.device": "engine.device",
    "kv.dtype": "kv.dtype",
    "kv.page_tokens": "kv.pageTokens",
    "kv.memory_bytes": "kv.pages",
    "kv.memory_fraction": "kv.memoryFractionPercent",
    "kv.gpu_memory_bytes": "gpu.memory",
    "kv.prefix_cache": "engine.prefixCache",
    "kv.host_bytes": "kv.hostMemory",
    "engine.max_context_tokens": "engine.maxContextTokens",
    "engine.max_running_sequences": "engine.maxRunningSequences",
    "engine.max_waiting_requests": "engine.maxWaitingRequests",
    "engine.overlap": "engine.overlap",
    "media.max_items": "media.maxItems",
    "media.max_item_bytes": "media.maxItemSize",
    "media.max_image_tokens": "media.maxImageTokens",
    "media.cache_bytes": "media.cacheSize",
    "http.request_timeout_s": "engine.requestTimeoutSeconds",
    "http.drain_propagation_s": "drain.propagationSeconds",
    "http.drain_timeout_s": "drain.streamSeconds",
    "http.api_keys_file": "auth.apiKeysSecret",
}
OPTIONAL_SPEC_FIELDS = {
    "media.max_video_tokens": "media.video.maxTokens",
    "media.max_video_s": "media.video.maxSeconds",
    "fetch.hosts": "media.links.hosts",
    "fetch.allow_http": "media.links.allowHttp",
    "fetch.ports": "media.links.ports",
    "fetch.private_networks": "media.links.privateNetworks",
    "fetch.max_bytes": "media.links.maxSize",
    "fetch.max_request_bytes": "media.links.maxRequestSize",
    "fetch.total_timeout_s": "media.links.timeoutSeconds",
    "fetch.cache_bytes": "media.links.cacheSize",
}
LISTENER_SETTINGS = frozenset({"http.host", "http.port", "http.admin_host", "http.admin_port", "http.admin_token_file"})
OVERRIDES = Overrides("engine.overrides", ServerSettings, SPEC_FIELDS, LISTENER_SETTINGS, OPTIONAL_SPEC_FIELDS)


def is_checked(spec: PrismDeploymentSpec) -> bool:
    """Whether this operator knows the settings of the image's version; where not, `SettingsUnchecked` is said."""
    return spec.image.version in ("", __version__)


def engine_config(spec: PrismDeploymentSpec) -> Config:
    """The file's content. Raises Refused (`InvalidSettings`, `NoShape`) for what no engine would start with."""
    config = OVERRIDES.merged(_from_spec(spec), spec.engine.overrides)
    if is_checked(spec):
        OVERRIDES.checked(config)
    return config


def settings_of(spec: PrismDeploymentSpec) -> ServerSettings:
    """The settings that the engine will run with; an unknown version's overrides cannot be read and do not count."""
    return OVERRIDES.checked(engine_config(spec) if is_checked(spec) else _from_spec(spec))


def config_text(spec: PrismDeploymentSpec) -> str:
    return json.dumps(engine_config(spec), indent=2, sort_keys=True) + "\n"


def config_map(deployment: Deployment) -> dict[str, Any]:
    """Immutable, named by its content: old pods keep theirs, and a new name in the template is a new revision."""
    text = config_text(deployment.spec)
    name = names.config(deployment, text)
    return child(deployment, "v1", "ConfigMap", name, immutable=True, data={names.CONFIG_KEY: text})


def model_path(spec: PrismDeploymentSpec) -> str:
    """Where the engine finds the checkpoint in its container; `demo` is the bundled one."""
    source = spec.model.source
    if source.demo is not None:
        return "demo"
    if source.hugging_face is not None:
        hub = source.hugging_face
        return f"{names.MODEL_DIR}/{names.model_directory(hub.repository, hub.revision)}"
    part = source.pvc or source.image
    return posixpath.normpath(f"{names.MODEL_DIR}/{part.path}") if part else names.MODEL_DIR


def served_name(spec: PrismDeploymentSpec) -> str:
    """`model.servedName`, else what a person would call the source."""
    source = spec.model.source
    if spec.model.served_name:
        return spec.model.served_name
    if source.hugging_face is not None:
        return source.hugging_face.repository
    if source.pvc is not None:
        return _last(source.pvc.path) or source.pvc.claim_name
    if source.host_path is not None:
        return _last(source.host_path.path)
    if source.image is not None:
        return _last(source.image.path) or _last(source.image.reference.split("@")[0]).split(":")[0]
    return "demo"


def _model_revision(spec: PrismDeploymentSpec) -> str:
    """Part of the cache namespace: other weights under one name never share KV."""
    source = spec.model.source
    if spec.model.revision:
        return spec.model.revision
    if source.hugging_face is not None:
        return source.hugging_face.revision
    return source.image.reference if source.image is not None else ""


def _last(path: str) -> str:
    return path.rstrip("/").rpartition("/")[2]


def _from_spec(spec: PrismDeploymentSpec) -> Config:
    engine, kv, media, drain = spec.engine, spec.kv, spec.media, spec.drain
    item_bytes = quantity_bytes(media.max_item_size)
    http: dict[str, Any] = {
        "host": "0.0.0.0",
        "port": names.API_PORT,
        "admin_host": "0.0.0.0",
        "admin_port": names.ADMIN_PORT,
        "admin_token_file": f"{names.ADMIN_TOKEN_DIR}/{names.ADMIN_TOKEN_KEY}",
        "max_body_bytes": max(MIN_BODY_BYTES, 2 * item_bytes),  # base64 adds a third
        "request_timeout_s": engine.request_timeout_seconds,
        "drain_propagation_s": drain.propagation_seconds,
        "drain_timeout_s": drain.stream_seconds,
    }
    if spec.auth.api_keys_secret:
        http["api_keys_file"] = names.API_KEYS_DIR
    config: Config = {
        "model": {
            "path": model_path(spec),
            "revision": _model_revision(spec),
            "served_name": served_name(spec),
            "device": engine.device,
        },
        "kv": {
            "dtype": kv.dtype,
            "page_tokens": kv.page_tokens,
            "memory_bytes": _pool_bytes(spec),
            "memory_fraction": kv.memory_fraction_percent / 100,
            "gpu_memory_bytes": _card_part_bytes(spec),
            "host_bytes": quantity_bytes(kv.host_memory),
            "prefix_cache": engine.prefix_cache,
        },
        "engine": {
            "max_context_tokens": engine.max_context_tokens,
            "max_running_sequences": engine.max_running_sequences,
            "max_waiting_requests": engine.max_waiting_requests,
            "overlap": engine.overlap,
        },
        "media": {
            "max_items": media.max_items,
            "max_item_bytes": item_bytes,
            "max_image_tokens": media.max_image_tokens,
            "cache_bytes": quantity_bytes(media.cache_size),
        },
        "http": http,
    }
    if media.video is not None:
        config["media"] |= {"max_video_tokens": media.video.max_tokens, "max_video_s": media.video.max_seconds}
    if media.links is not None:
        config["fetch"] = _fetch(media.links)
    return config


def _fetch(links: LinksSpec) -> dict[str, Any]:
    return {
        "hosts": links.hosts,
        "allow_http": links.allow_http,
        "ports": links.ports,
        "private_networks": links.private_networks,
        "max_bytes": quantity_bytes(links.max_size),
        "max_request_bytes": quantity_bytes(links.max_request_size),
        "total_timeout_s": links.timeout_seconds,
        "cache_bytes": quantity_bytes(links.cache_size),
    }


def _pool_bytes(spec: PrismDeploymentSpec) -> int:
    """`kv.pages` in the bytes of one card; 0 lets the pod size its pool."""
    if not spec.kv.pages:
        return 0
    shape = shape_of(spec)
    if shape is None:
        raise Refused("NoShape", "kv.pages needs model.shape: the bytes of a page depend on the model")
    layout = shape.page_layout(spec.kv.dtype, spec.kv.page_tokens, spec.engine.tensor_parallel)
    return spec.kv.pages * layout.page_bytes


def _card_part_bytes(spec: PrismDeploymentSpec) -> int:
    """`gpu.memory`: a shared card shows its whole memory to every pod. 0: all that the card has."""
    return quantity_bytes(spec.gpu.memory) if spec.gpu.memory and spec.engine.device != "cpu" else 0
