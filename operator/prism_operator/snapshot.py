"""All that a status is made of, as one pass found it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from prism_operator.admin_client import Capacity
from prism_operator.crd.spec import PrismDeploymentSpec
from prism_operator.plan import KVPlan
from prism_operator.pods import Pod, Trouble
from prism_operator.refused import Refused
from prism_operator.rollout import Moves
from prism_operator.routers import Routers


@dataclass(frozen=True, slots=True)
class Serving:
    """The engines' StatefulSet as it is."""

    generation: int
    """Of the PrismDeployment when it was last applied."""
    replicas: int
    template_version: int
    desired_revision: str | None
    """None while its controller has not seen the last template."""


def lacks_pods(serving: Serving, pods: Sequence[Pod]) -> bool:
    """Whether some of the wanted pods have not been made."""
    return sum(pod.ordinal < serving.replicas for pod in pods) < serving.replicas


@dataclass(frozen=True, slots=True)
class Problem:
    """A child that could not be brought to what the spec says."""

    is_conflict: bool
    """Somebody else's: it is left alone."""
    child: str
    message: str


@dataclass(frozen=True, slots=True)
class Snapshot:
    """`spec` is None when this operator cannot read it; then `freeze` says why."""

    generation: int
    moves: Moves
    spec: PrismDeploymentSpec | None = None
    serving: Serving | None = None
    pods: Sequence[Pod] = ()
    refusal: Trouble | None = None
    """Why the API server takes no further engine pod: a quota, an admission rule."""
    routers: Routers = field(default_factory=Routers)
    freeze: Refused | None = None
    plan: KVPlan | None = None
    problems: Sequence[Problem] = ()
    missing_apis: Sequence[str] = ()
    """Group versions that the spec asks for and the cluster lacks."""
    awaits_download: bool = False
    """The workload is not made or changed before the model is there."""
    capacities: Sequence[Capacity] = ()
    """What ready pods say of themselves."""
    claim: Mapping[str, Any] | None = None
    """The PersistentVolumeClaim of the model; None: there is none."""
    loader_job: Mapping[str, Any] | None = None
    loader_trouble: Trouble | None = None
    autoscaler: Mapping[str, Any] | None = None
    inference_pool: Mapping[str, Any] | None = None
    is_settings_checked: bool = True
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Names for the status: `selector`, `url`, `model`."""

    @property
    def ready_pods(self) -> list[Pod]:
        return [pod for pod in self.pods if pod.is_ready]
