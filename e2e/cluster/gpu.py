"""Fake NVIDIA cards: devices that the scheduler counts, and the labels that real cards' nodes carry."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from e2e.cluster.layout import Layout

RESOURCE = "nvidia.com/gpu"


@dataclass(frozen=True)
class Card:
    """A product as GPU feature discovery labels it."""

    product: str
    memory_mib: int

    def labels(self, count: int, *, replicas: int = 1) -> dict[str, str]:
        """Labels of a node with so many of them, each shared by `replicas` pods in time slices when above one."""
        sharing = "time-slicing" if replicas > 1 else "none"
        return {
            "nvidia.com/gpu.product": f"{self.product}-SHARED" if replicas > 1 else self.product,
            "nvidia.com/gpu.memory": str(self.memory_mib),
            "nvidia.com/gpu.count": str(count),
            "nvidia.com/gpu.replicas": str(replicas),
            "nvidia.com/gpu.sharing-strategy": sharing,
            "nvidia.com/mig.strategy": "single",
        }


RTX_5090 = Card("NVIDIA-GeForce-RTX-5090", 32607)
A100_80GB = Card("NVIDIA-A100-SXM4-80GB", 81920)
H100 = Card("NVIDIA-H100-80GB-HBM3", 81559)
H200 = Card("NVIDIA-H200", 143771)


@contextmanager
def devices(layout: Layout, count: int = 2, resource: str = RESOURCE) -> Iterator[None]:
    """Advertises so many devices to the kubelet while the block runs. To be used inside the cluster's namespaces."""
    process = subprocess.Popen(
        [layout.programs / "fakegpu", "-count", str(count), "-resource", resource], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        if process.stdout.readline() != "registered\n":
            raise RuntimeError("the kubelet took no device plugin; its log says why")
        yield
    finally:
        process.terminate()
        process.wait(10)
