"""The boundary between the scheduler's plans and the device."""

from __future__ import annotations

from abc import ABC, abstractmethod

from prism_server.engine.plan import StepPlan, StepResult
from prism_server.engine.staging import StagedItem
from prism_server.media.item import ItemKey, Patches


class StepHandle(ABC):
    """A launched step."""

    @abstractmethod
    def wait(self) -> StepResult:
        """Block until the step has completed. Raises what the device raised; then the engine is done for."""


class Executor(ABC):
    """Executes plans in order. Every method is called by the owner thread only and returns before the work is done."""

    repeats_itself: bool = False
    """Whether a step takes as long as the same step took before, to some hundred microseconds."""

    @abstractmethod
    def prepare(self, patches: Patches) -> StagedItem:
        """A copy of an item's pixels that the device can take by itself. Unlike all others, for any thread."""

    @abstractmethod
    def stage(self, key: ItemKey, item: StagedItem) -> None:
        """Hand over an item's pixels; they stay until a plan finishes encoding them or drops them."""

    @abstractmethod
    def launch(self, plan: StepPlan) -> StepHandle:
        """Start a step; depends on the plan and the device's state only."""

    @abstractmethod
    def close(self) -> None:
        """Finish what is launched and release the device."""
