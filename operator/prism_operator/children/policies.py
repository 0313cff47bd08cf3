"""NetworkPolicies: ports are told apart here, paths by the listeners themselves."""

from __future__ import annotations

from typing import Any
from urllib.parse import urlsplit

from prism_operator.children import names
from prism_operator.children.labels import Component, child, selector
from prism_operator.deployment import LABEL_COMPONENT, Deployment
from prism_operator.options import OperatorOptions

DNS_PORTS = (53, 5353)
"""Policies see the pod's port, not the Service's; some distributions run their resolvers on 5353."""

Rule = dict[str, Any]


def engine_policy(deployment: Deployment, options: OperatorOptions) -> dict[str, Any]:
    """`api` from `ingressFrom`, by default from every pod of the cluster, and from everywhere where the Service is
    one that the outside calls. `admin` from the operator, the deployment's own pods and `metricsFrom`. Out: names, and
    `egressTo`. The kubelet's probes are the node's own and pass any policy.
    """
    policy = deployment.spec.network_policy
    admin_peers = [_operator_peer(options), _own_pods_peer(deployment), *policy.metrics_from]
    ingress = [_ingress(names.API_PORT, _api_peers(deployment, options)), _ingress(names.ADMIN_PORT, admin_peers)]
    egress: list[Rule] = [_dns()]
    if policy.egress_to:
        egress.append({"to": list(policy.egress_to)})
    return _policy(deployment, names.engine(deployment), "engine", ingress, egress)


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


def _api_peers(deployment: Deployment, options: OperatorOptions) -> list[Rule]:
    """An empty list is everybody. The operator looks at how far starts are."""
    if deployment.spec.network_policy.ingress_from:
        return [*deployment.spec.network_policy.ingress_from, _operator_peer(options)]
    return [{"namespaceSelector": {}}] if deployment.spec.service.type == "ClusterIP" else []


def _operator_peer(options: OperatorOptions) -> Rule:
    return {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": options.operator_namespace}},
        "podSelector": {
            "matchLabels": {"app.kubernetes.io/instance": options.operator_name, LABEL_COMPONENT: "operator"}
        },
    }


def _own_pods_peer(deployment: Deployment) -> Rule:
    return {"podSelector": {"matchLabels": selector(deployment, "engine")}}


def _ingress(port: int, peers: list[Rule]) -> Rule:
    rule: Rule = {"ports": [_port(port)]}
    return rule | {"from": peers} if peers else rule


def _dns() -> Rule:
    """To any address: a node's own DNS cache is no pod that a selector could name."""
    return {"ports": [_port(port, protocol) for port in DNS_PORTS for protocol in ("UDP", "TCP")]}


def _port(port: int, protocol: str = "TCP") -> Rule:
    return {"port": port, "protocol": protocol}
