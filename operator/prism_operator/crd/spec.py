"""`spec` of a PrismDeployment."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator

from prism_operator.crd.base import DEFAULT_CLASS, NO_SWITCH, ImageReference, Model, Name, Open, Quantity
from prism_operator.crd.media import MediaSpec
from prism_operator.crd.network import GatewaySpec, MonitoringSpec, NetworkPolicySpec, ServiceSpec
from prism_operator.crd.pods import PodTemplateSpec, RouterPodTemplateSpec
from prism_operator.crd.sources import ModelSource

Positive = Annotated[int, Field(ge=1, le=2**31 - 1)]
NonNegative = Annotated[int, Field(ge=0, le=2**31 - 1)]


class ModelSpec(Model):
    """Which model is served, and under which name."""

    source: ModelSource
    served_name: Annotated[str, Field(max_length=253)] = Field(
        default="", description="name in /v1/models; default: by source"
    )
    revision: Annotated[str, Field(max_length=128)] = Field(default="", description="part of the cache namespace")
    shape: Literal["", "2b", "4b", "8b", "32b", "demo"] = Field(
        default="",
        description="shape to plan KV pages for; needed where the operator cannot tell it from the source's name",
    )


class ImageSpec(Model):
    """The engine's image. `version` names its settings schema and pod template; default: the operator's own."""

    reference: ImageReference = Field(default="", description="default: the operator's engine image")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="when it is pulled"
    )
    version: Annotated[str, Field(max_length=64)] = Field(default="", description="version of what the image holds")


class RouterImageSpec(Model):
    """The router's image. `image.version` names the version of what it holds, too."""

    reference: ImageReference = Field(default="", description="default: the operator's router image")
    pull_policy: Literal["Always", "IfNotPresent", "Never"] = Field(
        default="IfNotPresent", description="when it is pulled"
    )


class RouterSpec(Model):
    """The routers behind the Service that users call; `overrides` are further keys of their configuration, by group."""

    replicas: Annotated[int, Field(ge=1, le=64)] = Field(default=2, description="router pods; they share no state")
    image: RouterImageSpec = RouterImageSpec()
    overrides: Open = Field(default_factory=dict, description="for example {upstream: {max_tries: 2}}")
    pod_template: RouterPodTemplateSpec = RouterPodTemplateSpec()


class EngineSpec(Model):
    """The engine's settings; `overrides` are further keys of its configuration, by group."""

    tensor_parallel: Annotated[Literal[1, 2], NO_SWITCH] = Field(
        default=1, description="cards that one engine pod is split over; 2 is planned for and not served yet: no pods"
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: the card, where the pod has one")
    max_context_tokens: Positive = Field(default=32768, description="longest request, answer included")
    max_running_sequences: Annotated[int, Field(ge=1, le=4096)] = Field(
        default=64, description="requests computed together"
    )
    max_waiting_requests: Annotated[int, Field(ge=1, le=65536)] = Field(
        default=256, description="requests that wait; beyond it: 429 with Retry-After"
    )
    request_timeout_seconds: Annotated[int, Field(ge=1, le=86400)] = Field(
        default=600, description="deadline of a request, from arrival; drain.streamSeconds must hold it"
    )
    prefix_cache: bool = Field(
        default=True, description="pictures and prefixes that were seen before are not computed again"
    )
    overlap: bool = Field(default=True, description="a step is prepared while the one before runs")
    overrides: Open = Field(default_factory=dict, description="for example {engine: {chunk_tokens: 2048}}")


class KVSpec(Model):
    """The paged KV cache of each engine pod."""

    dtype: Literal["fp8", "bf16"] = Field(default="fp8", description="fp8 holds almost twice the tokens of bf16")
    page_tokens: Annotated[Literal[16, 32, 64, 128], NO_SWITCH] = Field(default=64, description="tokens in one page")
    pages: NonNegative = Field(default=0, description="0: as many as the card holds")
    min_tokens: NonNegative = Field(
        default=0,
        description="a card that holds fewer tokens is not eligible; at least one request of engine.maxContextTokens",
    )
    memory_fraction_percent: Annotated[int, Field(ge=10, le=98)] = Field(
        default=85, description="part of the card that the engine takes, weights included"
    )
    host_memory: Quantity = Field(default="0", description="host memory for cold prefixes")


class AutoscalingSpec(Model):
    """Scales `spec.replicas` through the scale subresource; leave `replicas` out of what you apply."""

    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        ("self.minReplicas <= self.maxReplicas", "minReplicas must not be above maxReplicas"),
    )
    kind: Literal["HPA", "KEDA"] = Field(default="HPA", description="KEDA makes a ScaledObject")
    min_replicas: Annotated[int, Field(ge=1, le=512)] = Field(default=1, description="never fewer")
    max_replicas: Annotated[int, Field(ge=1, le=512)] = Field(default=2, description="never more")
    target_tokens: Positive = Field(default=16384, description="waiting and running uncached tokens a pod")
    scale_down_seconds: Annotated[int, Field(ge=0, le=3600)] = Field(
        default=600, description="the load must have been low for so long"
    )

    @model_validator(mode="after")
    def _min_is_not_above_max(self) -> AutoscalingSpec:
        if self.min_replicas > self.max_replicas:
            raise ValueError("minReplicas must not be above maxReplicas")
        return self


class GPUSpec(Model):
    """The card that an engine pod gets, where the operator cannot or must not find it out."""

    resource_name: Annotated[str, Field(min_length=1, max_length=253)] = Field(
        default="nvidia.com/gpu", description="extended resource, for example nvidia.com/mig-3g.40gb"
    )
    memory: Quantity | None = Field(
        default=None, description="part of each card that a pod plans with; needed where cards are shared"
    )
    sharing: Literal["none", "time-slicing", "mps"] = Field(default="none", description="how pods share one card")


class AuthSpec(Model):
    """API keys: every value of the Secret is a file of keys, one a line. Keys rotate without a restart."""

    api_keys_secret: Name | None = Field(default=None, description="name of the Secret; absent: no key is asked for")


class DrainSpec(Model):
    """How a pod goes: first it lags behind the proxies, then its streams run out."""

    propagation_seconds: Annotated[int, Field(ge=0, le=300)] = Field(
        default=10, description="not ready, still accepting, since proxies learn of it late"
    )
    stream_seconds: Annotated[int, Field(ge=1, le=86400)] = Field(
        default=600, description="then running streams may finish"
    )


class StartupSpec(Model):
    """How long a pod may take to answer."""

    timeout_seconds: Annotated[int, Field(ge=10, le=86400)] = Field(
        default=1800, description="from start to the first answer"
    )
    stall_seconds: Annotated[int, Field(ge=5, le=3600)] = Field(
        default=300, description="`Stalled` says so when a start has not moved for so long"
    )


class PrismDeploymentSpec(Model):
    """What is to be served, with how many pods, on which cards."""

    cel: ClassVar[tuple[tuple[str, str], ...]] = (
        (
            "self.engine.requestTimeoutSeconds <= self.drain.streamSeconds",
            "drain.streamSeconds must hold the longest request: at least engine.requestTimeoutSeconds",
        ),
        (
            "!has(self.media.links) || self.media.links.timeoutSeconds <= self.engine.requestTimeoutSeconds",
            "media.links.timeoutSeconds must be within a request: at most engine.requestTimeoutSeconds",
        ),
        (
            "!has(self.media.video) || self.media.video.maxTokens < self.engine.maxContextTokens",
            "media.video.maxTokens must leave room for a question: below engine.maxContextTokens",
        ),
        (
            "has(self.operatorClass) == has(oldSelf.operatorClass)"
            " && (!has(self.operatorClass) || self.operatorClass == oldSelf.operatorClass)",
            "operatorClass is immutable",
        ),
        (
            "!(self.engine.tensorParallel == 2 && self.gpu.resourceName.contains('mig-'))",
            "a model cannot be split over MIG slices: tensorParallel must be 1",
        ),
        (
            "self.gpu.sharing == 'none' || has(self.gpu.memory)",
            "a shared card shows its whole memory to every pod: gpu.memory must say this pod's part",
        ),
    )
    operator_class: Name = Field(default=DEFAULT_CLASS, description="the operator that takes care of it; immutable")
    template_version: NonNegative = Field(
        default=0, description="pod template version; 0: the newest when it was created"
    )
    model: ModelSpec
    image: ImageSpec = ImageSpec()
    engine: EngineSpec = EngineSpec()
    router: RouterSpec = RouterSpec()
    kv: KVSpec = KVSpec()
    media: MediaSpec = MediaSpec()
    replicas: Annotated[int, Field(ge=0, le=512)] = Field(default=1, description="engine pods; an autoscaler writes it")
    autoscaling: AutoscalingSpec | None = None
    gpu: GPUSpec = GPUSpec()
    pod_template: PodTemplateSpec = PodTemplateSpec()
    auth: AuthSpec = AuthSpec()
    drain: DrainSpec = DrainSpec()
    startup: StartupSpec = StartupSpec()
    network_policy: NetworkPolicySpec = NetworkPolicySpec()
    service: ServiceSpec = ServiceSpec()
    gateway: GatewaySpec = GatewaySpec()
    monitoring: MonitoringSpec = MonitoringSpec()

    @classmethod
    def parse(cls, spec: dict[str, Any]) -> PrismDeploymentSpec:
        """From the wire. Raises pydantic's ValidationError, which the status reports, for what CEL let through."""
        return cls.model_validate(spec)
