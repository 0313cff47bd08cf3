"""A cold request of pictures beside running streams, on a device that takes time by a formula: what is measured here is
what the scheduler puts into a step, in simulated milliseconds."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest
from simulation import Sizes, World

from prism_server.engine.cost_model import Observation
from prism_server.engine.feature_cache import FeatureCache
from prism_server.engine.limits import SchedulerLimits
from prism_server.engine.messages import GenerateRequest
from prism_server.engine.plan import StepPlan, StepResult
from prism_server.engine.scheduler import Scheduler
from prism_server.engine.sequence import Sequence
from prism_server.identity import content_id
from prism_server.kv.cache import KVCache
from prism_server.media.item import ItemFacts, ItemKey, MediaItem

BUDGET_MS = 20.0
VISION_BLOCKS = 27
STREAM_TEXT, QUESTION = "a stream that decodes", "what is it?"


def language_ms(num_rows: int) -> float:
    """An 8B model on one large GPU: reading the weights, or the products where they take longer."""
    return max(4.2, 2.0 + 0.0265 * num_rows) if num_rows else 0.0


def encode_ms(patch_blocks: int) -> float:
    return 1.0 + 6.9e-5 * patch_blocks if patch_blocks else 0.0


def patch_blocks(plan: StepPlan) -> int:
    return sum(work.grid[1] * work.grid[2] * (work.last_block - work.first_block) for work in plan.encode)


@dataclass
class TimedDevice:
    """A scheduler and its plans, one running while the next is made."""

    items: list[tuple[int, int]]
    """Sides, in patches, of the cold request's pictures."""
    learned: bool = True
    budget_ms: float = BUDGET_MS
    now_ms: float = 0.0
    step_times_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.world = World(Sizes(page_tokens=64), random.Random(0))
        limits = SchedulerLimits(32768, 64, 8192, step_budget_ms=self.budget_ms)
        kv, features = KVCache(4096, 64), FeatureCache(1 << 30)
        self.scheduler = Scheduler(limits, kv, features, lambda tokens: tokens * 32768, VISION_BLOCKS)
        if self.learned:  # as a rehearsal does it
            self.scheduler.cost.observe(Observation(1, 0, 0, language_ms(1), 0.0))
            self.scheduler.cost.observe(Observation(0, 512, 0, language_ms(512), 0.0))
            self.scheduler.cost.observe(Observation(0, 0, 4096 * VISION_BLOCKS, 0.0, encode_ms(4096 * VISION_BLOCKS)))
        self.world.items = [self._item(number, *side) for number, side in enumerate(self.items)]
        self.in_flight: deque[StepPlan] = deque()
        self.numbers = 0

    @staticmethod
    def _item(number: int, height: int, width: int) -> tuple[MediaItem, ItemFacts]:
        data = f"picture {number}".encode()
        key = ItemKey(content_id("image", data), content_id("layout", b""))
        facts = ItemFacts(key, "image", (1, height, width), height * width // 4, 1, 1)
        return MediaItem("image", data), facts

    def submit(self, parts: list[int | str], max_tokens: int) -> Sequence:
        self.world.now_s = self.now_ms / 1e3
        request: GenerateRequest = self.world.make_request(parts, max_tokens, ignore_eos=True)
        sequence = Sequence(self.numbers, request, 0, 0, max_tokens)
        self.numbers += 1
        self.scheduler.add([sequence])
        return sequence

    def turn(self) -> None:
        """One turn of the owner's loop; pictures are decoded in no time."""
        plan = self.scheduler.schedule(self.now_ms / 1e3)
        for request in self.scheduler.take_media_requests():
            self.scheduler.media_arrived(request.facts.key, decoded=True, now_s=self.now_ms / 1e3)
        if plan is not None:
            self.in_flight.append(plan)
        if len(self.in_flight) > (plan is not None):
            self._complete(self.in_flight.popleft())

    def _complete(self, plan: StepPlan) -> None:
        encoder_ms = encode_ms(patch_blocks(plan))
        step_ms = encoder_ms + language_ms(plan.num_tokens)
        self.now_ms += step_ms
        self.step_times_ms.append(step_ms)
        draws = sum(rows.draw is not None for rows in plan.sequences)
        result = StepResult(plan.step, (1,) * draws, (None,) * draws, {}, step_ms, encoder_ms)
        self.scheduler.complete(result, self.now_ms / 1e3)
        self.scheduler.take_outcomes()

    def first_token_ms(self, num_streams: int) -> float:
        """Of the cold request, from its arrival beside so many streams."""
        for number in range(num_streams):
            self.submit([STREAM_TEXT + " again" * number], 10_000)
        for _ in range(40):
            self.turn()
        self.step_times_ms.clear()
        arrival_ms, cold = self.now_ms, self.submit([*range(len(self.items)), QUESTION], 10)
        while cold.first_token_s is None:
            self.turn()
        return self.now_ms - arrival_ms


COLD = {
    "eight pictures": [(28, 28)] * 8,
    "one of the largest": [(128, 128)],
    "a large one after text and small ones": [(28, 28)] * 3 + [(100, 128)],
    "twenty": [(28, 28)] * 20,
}


@pytest.mark.parametrize("items", COLD.values(), ids=COLD)
def test_a_cold_request_lengthens_no_step_beyond_its_budget_and_is_not_starved(items: list[tuple[int, int]]) -> None:
    alone_ms = TimedDevice(items).first_token_ms(num_streams=0)
    beside = TimedDevice(items)
    beside_ms = beside.first_token_ms(num_streams=8)
    assert max(beside.step_times_ms) <= 1.15 * BUDGET_MS
    # Each step also reads the weights for the streams: what is left of the budget is all that the request can have.
    share = (BUDGET_MS - language_ms(8)) / BUDGET_MS
    assert beside_ms <= alone_ms / share + 2 * BUDGET_MS


def test_hot_suffixes_that_cost_next_to_nothing_do_not_promise_cheap_chunks() -> None:
    device = TimedDevice(COLD["eight pictures"])
    for number in range(60):
        device.submit([STREAM_TEXT + " again" * number], 10_000 if number < 8 else 3)
        device.turn()
    for _ in range(20):  # chunks of some 70 rows: they hide behind the weights
        device.submit([f"{random.Random(device.numbers).random()} {'x' * 50}"], 2)
        device.turn()
        device.turn()
    device.step_times_ms.clear()
    device.submit([*range(8), QUESTION], 5)
    for _ in range(12):
        device.turn()
    assert max(device.step_times_ms) <= 1.15 * BUDGET_MS


@pytest.mark.parametrize("budget_ms", [BUDGET_MS, 1.0], ids=["room for chunks", "the least chunk only"])
def test_short_requests_are_not_held_up_by_a_long_one_that_has_waited_longer(budget_ms: float) -> None:
    """It has aged and goes first, but leaves them room: those that wait, and those that were admitted beside it."""
    device = TimedDevice([], budget_ms=budget_ms)
    for number in range(8):
        device.submit([STREAM_TEXT + " again" * number], 10_000)
    for _ in range(40):
        device.turn()
    long = device.submit(["x" * 30_000], 5)
    device.now_ms += 3000.0
    device.turn()
    short = [device.submit([f"{number}" * 150], 5) for number in range(8)]
    steps = len(device.step_times_ms)
    while any(sequence.first_token_s is None for sequence in short):
        before = long.num_planned
        device.turn()
        assert long.num_planned > before, "it goes on itself"
    chunk = max(64, (budget_ms - language_ms(8)) / 0.0265)
    assert len(device.step_times_ms) - steps <= 2 * (8 * 150 / (chunk / 2)) + 4
    assert long.num_planned < long.num_prefill
