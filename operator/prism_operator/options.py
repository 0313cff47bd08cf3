"""Options of the operator process; every interval is one, so that tests can shorten it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OperatorOptions:
    """Set by the chart through command-line flags (`cli.py`). Times are seconds."""

    engine_image: str = "prism-server:0.1.0"
    """CUDA engine image; used unless the spec names one."""
    cpu_image: str = "prism-server-cpu:0.1.0"
    """Engine image for `engine.device: cpu`; holds the demo model, too."""
    router_image: str = "prism-router:0.1.0"
    """Used unless the spec names one."""
    loader_image: str = "prism-operator:0.1.0"
    """Runs `python -m prism_operator.loader` in loader Jobs."""
    operator_class: str = "prism"
    namespace: str = ""
    """The one namespace it watches; empty: all."""
    operator_namespace: str = "prism-system"
    operator_name: str = "prism-operator"
    """Name of its Lease, its key Secret and the `app.kubernetes.io/instance` of its pods."""
    allow_host_path: bool = False
    api_server_ports: str = "443,6443"
    """Of the API server behind its Service, which routers must reach: a list with commas."""
    api_server_cidrs: str = ""
    """Where it is: a list with commas; empty: any address."""
    resync_s: float = 60.0
    status_min_interval_s: float = 30.0
    """Between status writes that only refresh measured pages."""
    lease_duration_s: float = 15.0
    lease_renew_deadline_s: float = 10.0
    lease_retry_s: float = 2.0
    liveness_resyncs: int = 5
    """Missed resyncs after which /healthz fails."""
    max_concurrent_rollouts: int = 1
    eviction_retry_s: float = 5.0
    lost_node_grace_s: float = 60.0
    """A pod that is Terminating on a NotReady node for longer than its grace and this is force-deleted."""
    health_port: int = 8081
    metrics_port: int = 8080
