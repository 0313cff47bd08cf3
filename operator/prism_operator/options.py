"""Options of the operator process; every interval is one, so that tests can shorten it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

HELP = "help"
"""Key of a field's metadata: a line for `--help`."""


def option(default: T, help: str) -> T:
    """A field of OperatorOptions, with the line that `--help` shows."""
    made: T = field(default=default, metadata={HELP: help})
    return made


@dataclass(frozen=True, slots=True)
class OperatorOptions:
    """Set by the chart through command-line flags (`cli.py`). Times are seconds."""

    engine_image: str = option("prism-server:0.1.0", "image of engines with a GPU, unless the spec names one")
    cpu_image: str = option("prism-server-cpu:0.1.0", "image of engines with `engine.device: cpu`, unless it does")
    router_image: str = option("prism-router:0.1.0", "image of routers, unless the spec names one")
    loader_image: str = option("prism-operator:0.1.0", "image of loader Jobs, which download models")
    operator_class: str = option("prism", "takes care of the PrismDeployments of this class, touches no others")
    namespace: str = option("", "the one namespace that it watches; empty: all")
    operator_namespace: str = option("prism-system", "its own namespace, with its Lease and its key")
    operator_name: str = option("prism-operator", "name of its Lease and its key, and the instance label of its pods")
    allow_host_path: bool = option(False, "let PrismDeployments mount directories of the node")
    api_server_ports: str = option("443,6443", "of the API server behind its Service, where routers must reach it")
    api_server_cidrs: str = option("", "addresses of the API server, a list with commas; empty: any")
    resync_s: float = option(60.0, "every PrismDeployment is looked at this often, whatever happens")
    status_min_interval_s: float = option(30.0, "between status writes that only refresh measured pages")
    lease_duration_s: float = option(15.0, "after which another operator may take the Lease")
    lease_renew_deadline_s: float = option(10.0, "without a renewal of the Lease for so long, the process ends")
    lease_retry_s: float = option(2.0, "between two tries to take or renew the Lease")
    liveness_resyncs: int = option(5, "missed resyncs after which /healthz fails")
    max_concurrent_rollouts: int = option(1, "PrismDeployments that are rolled out at the same time")
    eviction_retry_s: float = option(5.0, "an eviction that a disruption budget forbids is tried again after this")
    lost_node_grace_s: float = option(
        60.0, "a pod that terminates on a lost node for longer than its grace and this is force-deleted"
    )
    health_port: int = option(8081, "of /healthz")
    metrics_port: int = option(8080, "of /metrics")
