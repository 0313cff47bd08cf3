"""One pod in the eyes of one router: its own words, what was sent to it, and what is under way there."""

from __future__ import annotations

from dataclasses import dataclass, field

from prism_server.identity import Digest
from prism_server.router.estimate import Costs
from prism_server.router.load import Backlog
from prism_server.router.pods import KeyScheme, Pod, PodLoad


@dataclass(frozen=True, slots=True)
class Position:
    """Where the next poll of a pod's cache goes on."""

    epoch: str
    cursor: int


@dataclass(slots=True, eq=False)
class PodState:
    """One pod as this router sees it. Read by placement, written by the fleet."""

    pod: Pod
    slot: int
    ready_since_s: float
    scheme: KeyScheme | None = None
    load: PodLoad = field(default_factory=PodLoad)
    costs: Costs = field(default_factory=Costs)
    position: Position | None = None
    answer_s: float | None = None
    in_flight: int = 0
    others_inside: int = 0
    """Requests of others, as of the last report."""
    backlog: Backlog = field(default_factory=Backlog)
    work: float = 0.0
    """Recent work in milliseconds, on the fading clock's scale."""
    requests: float = 0.0
    """Recent requests, on the same scale."""
    saturated_until_s: float = float("-inf")
    life: int = 0
    """Raised whenever the pod has lost all it held."""

    @property
    def uid(self) -> str:
        return self.pod.uid

    @property
    def name(self) -> str:
        return self.pod.name

    @property
    def speaks_known_keys(self) -> bool:
        return self.scheme is not None and self.scheme.is_known

    @property
    def is_accepting(self) -> bool:
        return self.pod.is_ready is True and not self.pod.is_terminating and not self.load.is_draining

    @property
    def inside(self) -> int:
        """Requests at the pod, other routers' included."""
        return self.in_flight + self.others_inside

    @property
    def is_full(self) -> bool:
        """It would answer 429."""
        return 0 < self.load.max_inside <= self.inside


@dataclass(slots=True, eq=False)
class Ticket:
    """One request under way at one pod. Made by `Fleet.dispatch`; ended once by `Fleet.finish`."""

    pod: PodState
    keys: tuple[Digest, ...]
    """What it will leave there."""
    life: int
    """The pod's life when it was sent: a pod that has lost everything since is told nothing about keys."""
    sent_s: float
    own_ms: float
    """What its pod was thought to need for the first token..."""
    work_ms: float
    """...and for all of the answer."""
    is_computed: bool = False
    is_finished: bool = False
