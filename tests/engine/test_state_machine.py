"""The rules of INVARIANTS A to C as a hypothesis state machine: any order of events, shrunk when one breaks them.

`World.check` runs after every rule: references (3), what a plan may copy (5), bytes under every key (1, 2, 7, 8), reuse
of what a launched plan names (8b), pins of the waiting (12); `World` compares every answer with the one it gives alone
(6, 7, 13), counts encodings (12) and last events (13), and refuses a step that does nothing (9, 11). The end of every
run checks that nothing is left (14). 4, 8c and 15 to 18 have tests of their own.
"""

from __future__ import annotations

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from simulation import Sizes, World

sizes = st.builds(
    Sizes,
    num_pages=st.integers(2, 8),
    page_tokens=st.integers(2, 4),
    host_slots=st.sampled_from([0, 1, 3, 6]),
    feature_tokens=st.sampled_from([4, 5, 8, 20]),
    chunk_tokens=st.sampled_from([0, 1, 2, 5]),
    max_running=st.integers(1, 5),
    max_step_tokens=st.sampled_from([5, 8, 16, 64]),
    depth=st.sampled_from([0, 1]),
    prefix_cache=st.booleans(),
    overcommit=st.booleans(),
)
part = st.one_of(st.integers(0, 2), st.sampled_from(["a", "abcab", "abcabcdde", "eedcbabcde", "b", "cd"]))


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a `World`; every decision that is not hypothesis's own comes from one drawn seed."""

    world: World

    @initialize(sizes=sizes, seed=st.integers(0, 1 << 16))
    def start(self, sizes: Sizes, seed: int) -> None:
        self.world = World(sizes, random.Random(seed))

    @rule(
        parts=st.lists(part, min_size=1, max_size=5),
        last=st.text("abcde", min_size=1, max_size=6),
        max_tokens=st.integers(1, 8),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        ignore_eos=st.booleans(),
    )
    def request(self, parts: list[int | str], last: str, max_tokens: int, n: int, ignore_eos: bool) -> None:
        if len(self.world.live_requests()) < 12:
            self.world.add(self.world.make_request([*parts, last], max_tokens, n, ignore_eos))

    @rule(times=st.integers(1, 4))
    def step(self, times: int) -> None:
        for _ in range(times):
            self.world.step()

    @precondition(lambda self: self.world.pending_media)
    @rule(which=st.integers(0, 100), fails=st.sampled_from([False, False, False, True]))
    def a_medium_is_ready(self, which: int, fails: bool) -> None:
        self.world.media_arrives(which % len(self.world.pending_media), fails)

    @precondition(lambda self: self.world.live_requests())
    @rule(which=st.integers(0, 100))
    def a_client_leaves(self, which: int) -> None:
        live = self.world.live_requests()
        self.world.cancel(live[which % len(live)])

    @rule(which=st.integers(0, 2))
    def an_encoding_fails_or_works_again(self, which: int) -> None:
        self.world.executor.failing ^= {self.world.items[which][1].key}

    @rule()
    def idle_caches_are_forgotten(self) -> None:
        self.world.scheduler.forget_idle_caches()
        self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.executor.failing.clear()
            self.world.drain()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
