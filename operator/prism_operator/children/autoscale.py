"""What moves `spec.replicas`: an HPA, or KEDA's ScaledObject, on the PrismDeployment's scale subresource."""

from __future__ import annotations

from typing import Any

from prism_operator.children import names
from prism_operator.children.labels import child
from prism_operator.crd.base import GROUP, KIND, VERSION
from prism_operator.crd.spec import AutoscalingSpec
from prism_operator.deployment import Deployment

METRIC = "prism_uncached_tokens"
"""Gauge of each engine pod: tokens of waiting and running requests that its cache does not cover. It falls when the
load goes, however full the caches are."""
KEDA_API = "keda.sh/v1alpha1"


def autoscaler(deployment: Deployment, autoscaling: AutoscalingSpec) -> dict[str, Any]:
    make = _scaled_object if autoscaling.kind == "KEDA" else _hpa
    return make(deployment, autoscaling)


def _target(deployment: Deployment) -> dict[str, str]:
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "name": deployment.name}


def _behavior(autoscaling: AutoscalingSpec) -> dict[str, Any]:
    return {"scaleDown": {"stabilizationWindowSeconds": autoscaling.scale_down_seconds}}


def _hpa(deployment: Deployment, autoscaling: AutoscalingSpec) -> dict[str, Any]:
    target = {"type": "AverageValue", "averageValue": str(autoscaling.target_tokens)}
    spec = {
        "scaleTargetRef": _target(deployment),
        "minReplicas": autoscaling.min_replicas,
        "maxReplicas": autoscaling.max_replicas,
        "metrics": [{"type": "Pods", "pods": {"metric": {"name": METRIC}, "target": target}}],
        "behavior": _behavior(autoscaling),
    }
    return child(deployment, "autoscaling/v2", "HorizontalPodAutoscaler", names.autoscaler(deployment), spec=spec)


def _scaled_object(deployment: Deployment, autoscaling: AutoscalingSpec) -> dict[str, Any]:
    """KEDA asks the pods behind the headless Service itself; its operator must be among `metricsFrom`."""
    url = f"http://{names.engine(deployment)}.{deployment.namespace}.svc:{names.ADMIN_PORT}/metrics"
    trigger = {
        "type": "metrics-api",
        "metricType": "AverageValue",
        "metadata": {
            "url": url,
            "format": "prometheus",
            "valueLocation": METRIC,
            "targetValue": str(autoscaling.target_tokens),
            "aggregateFromKubeServiceEndpoints": "true",
            "aggregationType": "sum",
        },
    }
    spec = {
        "scaleTargetRef": _target(deployment),
        "minReplicaCount": autoscaling.min_replicas,
        "maxReplicaCount": autoscaling.max_replicas,
        "advanced": {"horizontalPodAutoscalerConfig": {"behavior": _behavior(autoscaling)}},
        "triggers": [trigger],
    }
    return child(deployment, KEDA_API, "ScaledObject", names.autoscaler(deployment), spec=spec)
