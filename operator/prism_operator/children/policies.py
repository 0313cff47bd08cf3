"""NetworkPolicies: ports are told apart here, paths by the listeners themselves."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from prism_operator.children import names
from prism_operator.children.labels import Component, child, selector
from prism_operator.crd.media import LinksSpec
from prism_operator.deployment import LABEL_COMPONENT, Deployment
from prism_operator.options import OperatorOptions

DNS_PORTS = (53, 5353)
"""Policies see the pod's port, not the Service's; some distributions run their resolvers on 5353."""
PUBLIC_NETWORKS = {
    "0.0.0.0/0": ("10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16"),
    "::/0": ("fc00::/7", "fe80::/10"),
}
"""Everything, and what of it is private, shared or link-local: pods, Services and metadata servers are there."""

Rule = dict[str, Any]


def engine_policy(deployment: Deployment, options: OperatorOptions) -> dict[str, Any]:
    """`api` from the routers and the operator, and from users where a gateway leads them past the routers. `admin` from
    routers, the operator and `metricsFrom`. Out: names, and `egressTo`, or without it what links need. The kubelet's
    probes are the node's own and pass any policy.
    """
    policy = deployment.spec.network_policy
    routers = _pods_peer(deployment, "router")
    api_peers = [routers, _operator_peer(options)]  # the operator looks at how far starts are
    if deployment.spec.gateway.inference_pool is not None:
        users = _user_peers(deployment)
        api_peers = [*users, *api_peers] if users else []
    admin_peers = [_operator_peer(options), routers, *policy.metrics_from]
    ingress = [_ingress(names.API_PORT, api_peers), _ingress(names.ADMIN_PORT, admin_peers)]
    egress: list[Rule] = [_dns()]
    if policy.egress_to:
        egress.append({"to": list(policy.egress_to)})
    elif deployment.spec.media.links is not None:
        egress.append(_to_links(deployment.spec.media.links))
    return _policy(deployment, names.engine(deployment), "engine", ingress, egress)


def _to_links(links: LinksSpec) -> Rule:
    """A policy knows no names of hosts: any public address, on the links' ports. The engine looks at hosts itself."""
    blocks = [{"cidr": cidr, "except": list(closed)} for cidr, closed in PUBLIC_NETWORKS.items()]
    blocks += [{"cidr": cidr} for cidr in links.private_networks]
    return {"ports": [_port(port) for port in links.open_ports], "to": [{"ipBlock": block} for block in blocks]}


def router_policy(deployment: Deployment, options: OperatorOptions) -> dict[str, Any]:
    """`api` from users, `admin` from the operator and `metricsFrom`. Out: names, the API server, the engines."""
    admin_peers = [_operator_peer(options), *deployment.spec.network_policy.metrics_from]
    ingress = [_ingress(names.API_PORT, _user_peers(deployment)), _ingress(names.ADMIN_PORT, admin_peers)]
    to_engines = {
        "ports": [_port(names.API_PORT), _port(names.ADMIN_PORT)],
        "to": [_pods_peer(deployment, "engine")],
    }
    egress = [_dns(), _to_api_server(options), to_engines]
    return _policy(deployment, names.router(deployment), "router", ingress, egress)


def loader_policy(deployment: Deployment) -> dict[str, Any]:
    """Nothing in; out to names and `loaderEgressTo`, by default to the hub's port, wherever it redirects to."""
    hub = deployment.spec.model.source.hugging_face
    assert hub is not None
    peers = list(deployment.spec.network_policy.loader_egress_to)
    egress = [_dns(), {"to": peers} if peers else {"ports": [_port(port) for port in _hub_ports(hub.endpoint)]}]
    return _policy(deployment, names.loader(deployment), "loader", [], egress)


def _hub_ports(endpoint: str) -> list[int]:
    parts = urlsplit(endpoint)
    return sorted({443, parts.port or (443 if parts.scheme == "https" else 80)})


def _policy(
    deployment: Deployment, name: str, component: Component, ingress: list[Rule], egress: list[Rule]
) -> dict[str, Any]:
    spec = {
        "podSelector": {"matchLabels": selector(deployment, component)},
        "policyTypes": ["Ingress", "Egress"],
        "ingress": ingress,
        "egress": egress,
    }
    return child(deployment, "networking.k8s.io/v1", "NetworkPolicy", name, component, spec=spec)


def _user_peers(deployment: Deployment) -> list[Rule]:
    """`ingressFrom`; by default every pod of the cluster, or everybody (an empty list) where the Service is one that
    the outside calls.
    """
    if deployment.spec.network_policy.ingress_from:
        return list(deployment.spec.network_policy.ingress_from)
    return [{"namespaceSelector": {}}] if deployment.spec.service.type == "ClusterIP" else []


def _operator_peer(options: OperatorOptions) -> Rule:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": options.operator_namespace}},
        "podSelector": {
            "matchLabels": {"app.kubernetes.io/instance": options.operator_name, LABEL_COMPONENT: "operator"}
        },
    }


def _pods_peer(deployment: Deployment, component: Component) -> Rule:
    return {"podSelector": {"matchLabels": selector(deployment, component)}}


def _to_api_server(options: OperatorOptions) -> Rule:
    """It is seldom a pod that a selector could name."""
    rule: Rule = {"ports": [_port(int(port)) for port in options.api_server_ports.split(",")]}
    cidrs = [cidr for cidr in options.api_server_cidrs.split(",") if cidr]
    return rule | {"to": [{"ipBlock": {"cidr": cidr}} for cidr in cidrs]} if cidrs else rule


def _ingress(port: int, peers: list[Rule]) -> Rule:
    rule: Rule = {"ports": [_port(port)]}
    return rule | {"from": peers} if peers else rule


def _dns() -> Rule:
    """To any address: a node's own DNS cache is no pod that a selector could name."""
    return {"ports": [_port(port, protocol) for port in DNS_PORTS for protocol in ("UDP", "TCP")]}


def _port(port: int, protocol: str = "TCP") -> Rule:
    return {"port": port, "protocol": protocol}
