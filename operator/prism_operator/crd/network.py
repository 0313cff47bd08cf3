"""How the pods are reached: Service, policies, gateways, monitors."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from prism_operator.crd.base import Annotations, Labels, Model, Name, Open

Peers = Annotated[list[Open], Field(max_length=32)]
Port = Annotated[int, Field(ge=1, le=65535)]


class NetworkPolicySpec(Model):
    """Who may reach the pods, and what they may reach. Peers are NetworkPolicyPeer objects.

    Users reach the routers, and the routers the engines.
    """

    enabled: bool = Field(default=True, description="off: no policy is made")
    ingress_from: Peers = Field(
        default_factory=list, description="who may ask; empty: the cluster, and everyone if service.type opens it"
    )
    metrics_from: Peers = Field(default_factory=list, description="who may read metrics, beside the operator")
    egress_to: Peers = Field(
        default_factory=list,
        description="what engines may reach, beside DNS; empty: nothing, or with media.links every public address on"
        " their ports, and their privateNetworks",
    )
    loader_egress_to: Peers = Field(
        default_factory=list,
        description="what the loader may reach, beside DNS; empty: any address, on port 443 and that of its endpoint",
    )


class ServiceSpec(Model):
    """The Service that users call."""

    type: Literal["ClusterIP", "NodePort", "LoadBalancer"] = Field(default="ClusterIP", description="as in a Service")
    port: Port = Field(default=80, description="port of the Service")
    annotations: Annotations = Field(default_factory=dict, description="for example of a cloud's load balancer")


class EndpointPickerRef(Model):
    """The Service of an endpoint picker in the same namespace."""

    name: Name = Field(description="name of the Service")
    port: Port = Field(default=9002, description="port of the Service")
    failure_mode: Literal["FailOpen", "FailClose"] = Field(
        default="FailClose", description="what a gateway does while the picker does not answer"
    )


class InferencePoolSpec(Model):
    """An InferencePool of the engine pods: gateways send requests to them directly, past the routers."""

    endpoint_picker_ref: EndpointPickerRef


class GatewaySpec(Model):
    """For gateways that know the Gateway API's inference extension."""

    inference_pool: InferencePoolSpec | None = None


class MonitoringSpec(Model):
    """Metrics for the Prometheus operator, where its API is there."""

    pod_monitor: bool = Field(
        default=True, description="make a PodMonitor for engines and one for routers if the cluster knows the kind"
    )
    labels: Labels = Field(default_factory=dict, description="labels that a Prometheus selects its monitors by")
