"""What discovery says of pods, whatever it is that knows them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prism_server.router.pods import Pod
from prism_server.router.upstream import Origin


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint(Pod):
    """One engine pod, and where to reach it."""

    api: Origin
    admin: Origin


OnEndpoints = Callable[[Sequence[Endpoint]], None]


class Discovery(Protocol):
    """A source of pods. When it does not answer, the last pods stand, and the router asks them itself."""

    async def run(self, on_endpoints: OnEndpoints) -> None:
        """Tells all pods that there are, at once and then whenever they have changed. Runs until it is cancelled."""
        ...

    def age_s(self, now_s: float) -> float | None:
        """Seconds since the source last confirmed what it said; 0 while it is being followed, None: never yet."""
        ...
