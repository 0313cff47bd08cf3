"""Every option of the engine server. Units are in the names; an unknown key is an error at start-up.

Plain values: nothing here looks at the environment. settings_cli.py fills them from the command line
(`--kv.dtype bf16`), the environment (`PRISM_KV__DTYPE`) and `--config FILE` (JSON), strongest first.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Network, IPv6Network, ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    FilePath,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from prism_server.capacity.models import ModelShape, Switch, WeightDtype
from prism_server.capacity.page_layout import KVDtype
from prism_server.capacity.plan import PlanRequest
from prism_server.capacity.units import GIB, MIB
from prism_server.http.logs import LogLevel


def _exists(path: Path) -> Path:
    if not path.exists():
        raise ValueError("must be a file or a directory that is there")
    return path


def _split(value: Any) -> Any:
    """A list as the command line and the environment spell it: `a,b`."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


BOOLEAN = TypeAdapter(bool)


def _switched(value: Any) -> Any:
    """`on` or `off` for what spells a boolean, as true and false do; YAML takes `on` and `off` themselves for these."""
    try:
        return "on" if BOOLEAN.validate_python(value) else "off"
    except ValidationError:
        return value


HOST_RULE = re.compile(r"\*|(\*\.)?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")


def _host_rules(rules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(_host_rule, rules))


def _host_rule(text: str) -> str:
    """In the one spelling that hosts of links are compared with."""
    rule = text.lower()
    if HOST_RULE.fullmatch(rule):
        return rule
    try:
        return str(ip_address(rule))
    except ValueError:
        raise ValueError(f"{text!r} is no host: example.org, *.example.org, an address, or * for all") from None


ExistingPath = Annotated[Path, AfterValidator(_exists)]
Item = TypeVar("Item")
List = Annotated[tuple[Item, ...], BeforeValidator(_split)]
HostRules = Annotated[List[str], AfterValidator(_host_rules)]
AutoSwitch = Annotated[Switch, BeforeValidator(_switched)]
Positive = Annotated[int, Field(ge=1)]
NonNegative = Annotated[int, Field(ge=0)]
Port = Annotated[int, Field(ge=0, le=65535)]


class Group(BaseModel):
    """Base of the option groups."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class ModelSettings(Group):
    """Which checkpoint is served, where and in which arithmetic."""

    path: str = Field(default="demo", description="checkpoint directory, or `demo` for the bundled model")
    revision: str = Field(
        default="", description="part of the cache namespace; set it when weights change under one path"
    )
    served_name: str = Field(default="", description="name in /v1/models; by default the directory's name")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="auto: bfloat16 on CUDA, float32 on CPU"
    )
    backend: Literal["auto", "torch", "triton", "flashinfer"] = Field(
        default="auto",
        description="operators; auto: triton on an NVIDIA GPU, torch on CPU. One that is not there is an error",
    )
    load_format: Literal["safetensors", "random"] = Field(
        default="safetensors", description="random: weights made in place, for benchmarks; answers are nonsense"
    )
    load_threads: NonNegative = Field(default=0, description="readers of the weights; 0: one a core, at most 8")
    fp8_head: AutoSwitch = Field(
        default="auto",
        description="an FP8 copy of the LM head finds candidates for greedy tokens, the head ranks them; auto: on with "
        "the triton backend in bfloat16, if the hidden size is a multiple of 32",
    )
    threads: NonNegative = Field(default=0, description="torch threads on CPU; 0: half of the cores")

    @property
    def directory(self) -> Path:
        """The checkpoint's directory."""
        return Path(__file__).parent / "demo_model" / "checkpoint" if self.path == "demo" else Path(self.path)

    @property
    def planned_backend(self) -> str:
        """The operators that a plan on paper counts with; for `auto`, those of GPUs that the Triton kernels are for."""
        if self.backend != "auto":
            return self.backend
        return "torch" if self.device == "cpu" else "triton"


class KVSettings(Group):
    """The paged KV cache."""

    dtype: KVDtype = "fp8"
    page_tokens: Positive = 64
    memory_bytes: NonNegative = Field(
        default=0, description="bytes of the page pool; 0 sizes it from what the device has left"
    )
    memory_fraction: Annotated[float, Field(gt=0.0, le=0.98)] = Field(
        default=0.85, description="of the device, weights included"
    )
    gpu_memory_bytes: NonNegative = Field(
        default=0, description="this server's part of the card, where it shares one; 0: all that the card has"
    )
    prefix_cache: bool = Field(default=True, description="off: nothing is shared or found again (the twin for tests)")
    host_bytes: NonNegative = Field(
        default=0, description="host memory for cold prefixes and preempted requests; 0 is off"
    )


class EngineSettings(Group):
    """The scheduler's limits and the loop."""

    max_context_tokens: Positive = 32768
    max_running_sequences: Positive = 64
    max_waiting_requests: Positive = Field(default=256, description="beyond it: 429 with Retry-After")
    max_step_tokens: Positive = Field(default=8192, description="language tokens in one step where there are no graphs")
    chunk_tokens: NonNegative = Field(
        default=0, description="longest prefill chunk of one request; 0: as the step allows"
    )
    step_budget_ms: Annotated[float, Field(gt=0)] = Field(
        default=24.0, description="a step's time while anything decodes"
    )
    ageing_ms: NonNegative = Field(
        default=2000, description="a request that has waited longer goes first, whatever its work"
    )
    feature_cache_bytes: Positive = Field(default=1 * GIB, description="encoder outputs, pinned ones included")
    graphs: bool = Field(default=True, description="replay steps as CUDA graphs where the backend can; off: the twin")
    max_graph_tokens: Positive = Field(
        default=1536, description="rows of the largest captured step; no step has more, unless so many sequences decode"
    )
    overlap: bool = Field(default=True, description="prepare a step while the one before runs; off: the plain loop")
    step_timeout_s: Annotated[float, Field(ge=0)] | None = Field(
        default=None,
        description="a step that takes longer is a fault, and the server ends; 0: never; unset: 300 on CUDA, never on "
        "a CPU",
    )


class MediaSettings(Group):
    """What a request may bring and how it is shown to the model."""

    max_items: NonNegative = Field(default=64, description="media in one request")
    max_item_bytes: Positive = 64 * MIB
    max_decoded_pixels: Positive = Field(
        default=100_000_000, description="width x height of a picture, from its header"
    )
    max_image_tokens: Positive = Field(default=4096, description="larger pictures are scaled down to it")
    max_video_tokens: Positive = Field(
        default=12_288, description="a clip above it is shown with fewer frames, then with smaller ones"
    )
    max_video_s: Annotated[float, Field(gt=0)] = Field(default=3600.0, description="longest clip")
    max_video_decoded_pixels: Positive = Field(
        default=100_000_000_000, description="width x height of all frames that a clip makes the decoder go through"
    )
    max_listed_frames: Positive = Field(default=1024, description="pictures in a clip that is sent as a list of them")
    share_repeated_frames: bool = Field(
        default=False, description="encode a clip's frames that equal those before, pixel by pixel, once"
    )
    video_prompt: Literal["nested", "flat"] = Field(
        default="nested",
        description="nested: a clip's frames stand inside the template's vision tokens, as transformers has it from "
        "5.10 on; flat: in their place, as before",
    )
    workers: NonNegative = Field(default=0, description="decoding threads; 0: one a core, at most 8")
    cache_bytes: NonNegative = Field(default=1 * GIB, description="decoded patches kept on the host")
    facts_items: Positive = Field(
        default=1_000_000, description="media whose facts are remembered (some 200 bytes each)"
    )


class FetchSettings(Group):
    """Media that requests name by http(s) links instead of sending them. Off until hosts are listed."""

    hosts: HostRules = Field(
        default=(), description="that links may name: example.org, *.example.org (its subdomains), or * for all"
    )
    allow_http: bool = Field(default=False, description="http links too; anybody on the way can read and change those")
    ports: List[Port] = Field(default=(), description="that links may name; none: 443, and 80 for http")
    private_networks: List[IPv4Network | IPv6Network] = Field(
        default=(), description="networks that links may lead into although they are private: a cluster's object store"
    )
    ca_file: Path | None = Field(
        default=None, description="further certificate authorities (PEM), beside the public ones"
    )
    max_bytes: Positive = Field(default=64 * MIB, description="of one link's answer; media.max_item_bytes holds too")
    max_request_bytes: Positive = Field(default=128 * MIB, description="of all links of one request")
    max_request_links: Positive = Field(default=128, description="different links of one request")
    max_redirects: NonNegative = 3
    connect_timeout_s: Annotated[float, Field(gt=0)] = Field(default=5.0, description="for each address of a host")
    total_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=30.0, description="for one link, from the first name looked up to the last byte"
    )
    concurrency: Positive = Field(default=16, description="links fetched at the same time; the others wait their turn")
    cache_bytes: NonNegative = Field(default=256 * MIB, description="answers kept on the host; 0 keeps none")
    max_fresh_s: NonNegative = Field(
        default=300, description="longest time that an answer's own max-age is believed before its host is asked again"
    )


class HTTPSettings(Group):
    """The two listeners."""

    host: str = "0.0.0.0"
    port: Port = 8000
    admin_host: str = "0.0.0.0"
    admin_port: Port = 9000
    max_body_bytes: Positive = 128 * MIB
    page: bool = Field(default=True, description="the page at / to try the model on; off: 404")
    request_timeout_s: Annotated[float, Field(gt=0)] = Field(
        default=600.0, description="deadline of a request, from arrival"
    )
    drain_propagation_s: Annotated[float, Field(ge=0)] = Field(
        default=0.0, description="after SIGTERM, still open but not ready, until every proxy has noticed"
    )
    drain_timeout_s: Annotated[float, Field(ge=0)] = Field(
        default=60.0, description="after SIGTERM, for the running streams"
    )
    api_keys_file: ExistingPath | None = Field(
        default=None, description="one key a line, or a directory of such files; absent: no key is asked for"
    )
    admin_token_file: FilePath | None = Field(
        default=None, description="token of /internal/*; absent: open to read, and to change on loopback only"
    )


class LogSettings(Group):
    """What is written to stderr."""

    level: LogLevel = Field(default="info", description="of Prism's own lines; libraries' from warnings on")


class ServerLogSettings(LogSettings):
    """What is written to stderr."""

    requests: bool = Field(default=True, description="a line for each request under /v1/ when it has ended")


class ServerSettings(Group):
    """All of `prism-serve`."""

    model: ModelSettings = ModelSettings()
    kv: KVSettings = KVSettings()
    engine: EngineSettings = EngineSettings()
    media: MediaSettings = MediaSettings()
    fetch: FetchSettings = FetchSettings()
    http: HTTPSettings = HTTPSettings()
    log: ServerLogSettings = ServerLogSettings()

    @model_validator(mode="after")
    def _step_holds_a_decode_of_everyone(self) -> ServerSettings:
        step, sequences = self.engine.max_step_tokens, self.engine.max_running_sequences
        if step < sequences:
            raise ValueError(f"engine.max_step_tokens {step} must be at least engine.max_running_sequences {sequences}")
        return self

    def plan_request(self, shape: ModelShape, gpu_memory_bytes: int, tensor_parallel: int = 1) -> PlanRequest:
        """What a page plan needs to know of these settings: one sum for the server, the operator and paper."""
        weights: WeightDtype = "fp32" if self.model.dtype == "float32" else "bf16"
        has_fp8_head = shape.text.has_fp8_head(self.model.fp8_head, self.model.planned_backend, weights)
        return PlanRequest(
            shape,
            gpu_memory_bytes=gpu_memory_bytes,
            memory_fraction=self.kv.memory_fraction,
            kv_dtype=self.kv.dtype,
            page_tokens=self.kv.page_tokens,
            weight_dtype=weights,
            fp8_head="on" if has_fp8_head else "off",
            tensor_parallel=tensor_parallel,
            max_context_tokens=self.engine.max_context_tokens,
            max_step_tokens=self.engine.max_step_tokens,
            max_running_sequences=self.engine.max_running_sequences,
            max_image_tokens=self.media.max_image_tokens,
            max_video_tokens=self.media.max_video_tokens,
            feature_cache_bytes=self.engine.feature_cache_bytes,
        )
