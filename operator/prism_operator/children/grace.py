"""How long pods may take to go. Each process ends by itself, within its grace."""

from __future__ import annotations

from prism_operator.crd.spec import PrismDeploymentSpec

MARGIN_S = 15
"""Beyond propagation and streams, for the last events and for a process to let go."""


def engine_grace_s(spec: PrismDeploymentSpec) -> int:
    return spec.drain.propagation_seconds + spec.drain.stream_seconds + MARGIN_S


def router_grace_s(spec: PrismDeploymentSpec) -> int:
    """Longer than an engine's: clients hold their streams to the router."""
    return engine_grace_s(spec) + MARGIN_S
