"""What a PrismDeployment becomes: a pure function from its spec to Kubernetes objects."""

from __future__ import annotations

from typing import Any

from prism_operator.children import (
    accounts,
    autoscale,
    config,
    engine,
    gateway,
    loader_job,
    names,
    pdb,
    pod_monitor,
    policies,
    router,
    services,
    versions,
)
from prism_operator.deployment import ROUTER_TEMPLATE_VERSIONS, Deployment
from prism_operator.options import OperatorOptions
from prism_operator.refused import Refused

OPTIONAL_APIS = frozenset({autoscale.KEDA_API, gateway.INFERENCE_API, pod_monitor.MONITORING_API})
"""Group versions of children that a cluster may lack."""
CREATE_ONLY_KINDS = frozenset({"ConfigMap", "Job"})
"""Immutable, with a name that says what is in them: one that is there is right and is not applied again."""


def children(
    deployment: Deployment,
    options: OperatorOptions,
    template_version: int,
    apis: frozenset[str] = frozenset(),
    router_version: int = ROUTER_TEMPLATE_VERSIONS[-1],
) -> list[dict[str, Any]]:
    """Every child, in the order in which they are applied; those of optional APIs only where `apis` has them.

    Pure: no clock, no cluster. `versions` says which options and template version a workload goes on with. The Secret
    with the admin token (`names.admin_token`) is not among them: its content is no function of the spec. Raises Refused
    for what cannot be rendered; nothing that serves must change then.
    """
    versions.ENGINE.check_version(template_version)
    versions.ROUTER.check_version(router_version)
    source = deployment.spec.model.source
    if source.host_path is not None and not options.allow_host_path:
        raise Refused("HostPathNotAllowed", "model.source.hostPath: this operator runs without allowHostPath")
    return [
        accounts.service_account(deployment),
        *accounts.router_identity(deployment),
        *_network_policies(deployment, options),
        config.config_map(deployment),
        services.headless_service(deployment),
        services.user_service(deployment),
        *_model_download(deployment, options),
        pdb.disruption_budget(deployment, names.engine(deployment), "engine"),
        pdb.disruption_budget(deployment, names.router(deployment), "router"),
        router.router_deployment(deployment, options, router_version),
        engine.stateful_set(deployment, options, template_version),
        *_optional(deployment, apis),
    ]


def missing_apis(deployment: Deployment, apis: frozenset[str]) -> list[str]:
    """Group versions that the spec asks for by name and the cluster lacks; worth a line in the status, no more."""
    spec = deployment.spec
    wanted = [autoscale.KEDA_API] if spec.autoscaling is not None and spec.autoscaling.kind == "KEDA" else []
    wanted += [gateway.INFERENCE_API] if spec.gateway.inference_pool is not None else []
    return [api for api in wanted if api not in apis]


def _network_policies(deployment: Deployment, options: OperatorOptions) -> list[dict[str, Any]]:
    if not deployment.spec.network_policy.enabled:
        return []
    made = [policies.engine_policy(deployment, options), policies.router_policy(deployment, options)]
    if deployment.spec.model.source.hugging_face is not None:
        made.append(policies.loader_policy(deployment))
    return made


def _model_download(deployment: Deployment, options: OperatorOptions) -> list[dict[str, Any]]:
    hub = deployment.spec.model.source.hugging_face
    if hub is None:
        return []
    job = loader_job.loader_job(deployment, options, hub)
    return [job] if hub.storage.claim_name else [loader_job.model_store(deployment, hub), job]


def _optional(deployment: Deployment, apis: frozenset[str]) -> list[dict[str, Any]]:
    made = []
    spec, missing = deployment.spec, missing_apis(deployment, apis)
    if spec.autoscaling is not None and autoscale.KEDA_API not in missing:
        made.append(autoscale.autoscaler(deployment, spec.autoscaling))
    if spec.gateway.inference_pool is not None and gateway.INFERENCE_API not in missing:
        made.append(gateway.inference_pool(deployment, spec.gateway.inference_pool))
    if spec.monitoring.pod_monitor and pod_monitor.MONITORING_API in apis:
        made.append(pod_monitor.pod_monitor(deployment, names.engine(deployment), "engine"))
        made.append(pod_monitor.pod_monitor(deployment, names.router(deployment), "router"))
    return made
