"""Rollouts under a simulated StatefulSet controller, scheduler and kubelet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_operator.pods import Pod, Trouble
from prism_operator.rollout import Moves, Phase, next_moves

BAD = frozenset({"bad"})
"""The revision whose pods never become ready."""


def pod(ordinal: int, revision: str, *, ready: bool = True, terminating: bool = False, uid: str = "") -> Pod:
    return Pod(
        name=f"engine-{ordinal}",
        uid=uid or f"{ordinal}-{revision}",
        revision=revision,
        ordinal=ordinal,
        is_ready=ready and not terminating,
        is_terminating=terminating,
        gone_by_s=0.0 if terminating else None,
    )


def moves(
    pods: list[Pod],
    desired: str | None,
    replicas: int,
    *,
    announced: bool = True,
    has_slot: bool = True,
    unrouted: Sequence[Pod] = (),
    silent_router: str = "",
    now_s: float = 0.0,
) -> Moves:
    waits = {item.uid: f"some router does not know {item.name} yet" for item in unrouted}
    return next_moves(
        pods,
        desired,
        replicas,
        is_announced=announced,
        has_slot=has_slot,
        unrouted=waits,
        silent_router=silent_router,
        now_s=now_s,
    )


@dataclass
class Cluster:
    """A StatefulSet of the strategy OnDelete and policy Parallel, step by step."""

    replicas: int
    revision: str = "good-0"
    pods: dict[int, Pod] = field(default_factory=dict)
    age: dict[int, int] = field(default_factory=dict)
    start_steps: int = 2
    drain_steps: int = 2
    born: int = 0
    router_steps: int = 1
    """How long the slowest router takes to hear of a pod that is ready."""
    announced: bool = False
    now_s: float = 0.0

    def __post_init__(self) -> None:
        self.settle()

    def settle(self) -> None:
        for _ in range(3 * (self.start_steps + self.drain_steps + self.router_steps)):
            self.step_controllers()

    def step_controllers(self) -> None:
        self.now_s += 10.0
        for ordinal in list(self.pods):
            self.age[ordinal] += 1
            item = self.pods[ordinal]
            if item.is_terminating and self.age[ordinal] >= self.drain_steps:
                del self.pods[ordinal]
            elif not item.is_terminating and self.age[ordinal] >= self.start_steps and item.revision not in BAD:
                self.pods[ordinal] = replace(item, is_ready=True)
            if ordinal >= self.replicas and ordinal in self.pods and not item.is_terminating:
                self.delete(ordinal)
        for ordinal in range(self.replicas):
            if ordinal not in self.pods:
                self.born += 1
                made = pod(ordinal, self.revision, ready=False, uid=str(self.born))
                self.pods[ordinal] = replace(made, unready_since_s=self.now_s)
                self.age[ordinal] = 0

    def delete(self, ordinal: int) -> None:
        self.pods[ordinal] = replace(self.pods[ordinal], is_ready=False, is_terminating=True, gone_by_s=0.0)
        self.age[ordinal] = 0

    def edit(self, revision: str) -> None:
        self.revision, self.announced = revision, False

    def step_operator(self) -> Moves:
        pods = list(self.pods.values())
        found = moves(
            pods,
            self.revision,
            self.replicas,
            announced=self.announced,
            unrouted=[item for item in pods if item.is_ready and not self.is_routed(item)],
            now_s=self.now_s,
        )
        self.announced = found.phase is Phase.NO_SURGE
        if found.evict is not None:
            self.delete(found.evict.ordinal)
        return found

    @property
    def num_ready(self) -> int:
        return sum(item.is_ready for item in self.pods.values())

    def is_routed(self, item: Pod) -> bool:
        return item.is_ready and self.age[item.ordinal] >= self.start_steps + self.router_steps

    @property
    def num_routed(self) -> int:
        return sum(map(self.is_routed, self.pods.values()))


@given(
    replicas=st.integers(1, 5),
    edits=st.lists(st.tuples(st.integers(0, 12), st.sampled_from(["good-1", "good-2", "good-3", "bad"])), max_size=6),
    start_steps=st.integers(1, 4),
    drain_steps=st.integers(1, 4),
    router_steps=st.integers(0, 3),
)
def test_edits_in_a_row_never_go_below_the_floor_and_every_rollout_ends(
    replicas: int, edits: list[tuple[int, str]], start_steps: int, drain_steps: int, router_steps: int
) -> None:
    """The floor is of pods that are ready and that every router sends requests to."""
    cluster = Cluster(replicas, start_steps=start_steps, drain_steps=drain_steps, router_steps=router_steps)
    for pause, revision in [*edits, (0, "good-9")]:
        cluster.edit(revision)
        for _ in range(pause):
            cluster.step_operator()
            assert cluster.num_routed >= replicas - 1
            cluster.step_controllers()
    for _ in range(20 + 3 * replicas * (start_steps + drain_steps + router_steps + 2)):
        found = cluster.step_operator()
        assert cluster.num_routed >= replicas - 1
        cluster.step_controllers()
    assert found.phase is Phase.DONE
    assert {item.revision for item in cluster.pods.values()} == {"good-9"}
    assert cluster.num_ready == len(cluster.pods) == replicas


@given(
    replicas=st.integers(0, 5),
    changes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 5), st.sampled_from(["good-1", "bad"])), max_size=6),
)
def test_scaling_in_the_middle_of_rollouts_ends_with_the_last_numbers(
    replicas: int, changes: list[tuple[int, int, str]]
) -> None:
    cluster = Cluster(replicas)
    for pause, size, revision in changes:
        cluster.replicas = size
        cluster.edit(revision)
        for _ in range(pause):
            cluster.step_operator()
            cluster.step_controllers()
    cluster.edit("good-9")
    for _ in range(80):
        found = cluster.step_operator()
        cluster.step_controllers()
    assert found.phase is Phase.DONE
    assert cluster.num_ready == len(cluster.pods) == cluster.replicas


def test_a_bad_image_takes_one_pod_and_the_way_back_needs_nobody() -> None:
    cluster = Cluster(3)
    cluster.edit("bad")
    for _ in range(30):
        cluster.step_operator()
        cluster.step_controllers()
    assert cluster.num_ready == 2
    assert [item.revision for item in cluster.pods.values()].count("bad") == 1
    cluster.edit("good-0")
    for _ in range(10):
        cluster.step_operator()
        cluster.step_controllers()
    assert cluster.num_ready == 3


def test_unready_pods_of_an_old_revision_go_first() -> None:
    found = moves([pod(0, "old", ready=False), pod(1, "old"), pod(2, "old")], "new", 3)
    assert found.evict is not None
    assert found.evict.ordinal == 0


def test_the_next_pod_goes_only_when_all_others_are_ready() -> None:
    found = moves([pod(0, "old"), pod(1, "old"), pod(2, "new", ready=False)], "new", 3)
    assert (found.evict, found.phase) == (None, Phase.WAITING)
    assert moves([pod(0, "old"), pod(2, "new")], "new", 3).evict is None, "a pod that is missing is not available"


def test_the_next_pod_goes_only_when_every_router_sends_requests_to_all_others() -> None:
    new, old = pod(1, "new"), pod(0, "old")
    found = moves([old, new], "new", 2, unrouted=[new])
    assert (found.evict, found.phase) == (None, Phase.ROUTERS)
    assert found.message == "1 of 2 pods have an old revision; some router does not know engine-1 yet"
    assert found.wants_slot
    assert moves([old, new], "new", 2).evict == old
    assert moves([old, new], "new", 2, unrouted=[old]).evict == old, "nobody misses the one that goes"


def test_a_router_that_nobody_can_ask_holds_the_next_pod_back_and_no_rollout_that_is_over() -> None:
    pods, silent = [pod(0, "old"), pod(1, "new")], "router r-a does not answer the operator"
    held = moves(pods, "new", 2, silent_router=silent)
    assert (held.evict, held.phase) == (None, Phase.ROUTERS)
    assert silent in held.message
    assert moves([pod(0, "new"), pod(1, "new")], "new", 2, silent_router=silent).phase is Phase.DONE
    assert moves([pod(0, "old")], "new", 1, silent_router=silent).evict == pod(0, "old"), "there is nobody else"


def test_a_rollout_is_done_when_every_router_sends_requests_to_the_last_pod() -> None:
    pods = [pod(0, "new"), pod(1, "new")]
    found = moves(pods, "new", 2, unrouted=pods[1:])
    assert (found.phase, found.message) == (
        Phase.STARTING,
        "2 of 2 pods are ready; some router does not know engine-1 yet",
    )
    assert moves(pods, "new", 2).phase is Phase.DONE


def test_unready_pods_go_first_whatever_routers_know() -> None:
    pods = [pod(0, "old", ready=False), pod(1, "new")]
    assert moves(pods, "new", 2, unrouted=pods[1:]).evict == pods[0]


def test_a_pod_whose_readiness_flickers_is_not_taken_while_another_is_missing() -> None:
    pods = [pod(0, "old"), pod(1, "old", ready=False), pod(2, "new", ready=False)]
    assert moves(pods, "new", 3, now_s=29.0).evict is None
    assert moves(pods, "new", 3, now_s=30.0).evict == pods[1]
    crashed = replace(pods[1], trouble=Trouble("Error", "it ended"))
    assert moves([pods[0], crashed, pods[2]], "new", 3, now_s=1.0).evict == crashed
    nobody = [pod(0, "old", ready=False), pod(1, "old", ready=False)]
    assert moves(nobody, "new", 2, now_s=1.0).evict == nobody[1], "nobody is served: nothing to lose"


def test_nothing_moves_while_a_pod_leaves() -> None:
    found = moves([pod(0, "old"), pod(1, "old"), pod(2, "old", terminating=True)], "new", 3)
    assert (found.evict, found.phase) == (None, Phase.ROLLING)


def test_with_one_replica_no_surge_is_said_before_the_gap() -> None:
    before = moves([pod(0, "old")], "new", 1, announced=False)
    assert (before.evict, before.phase) == (None, Phase.NO_SURGE)
    after = moves([pod(0, "old")], "new", 1, announced=True)
    assert (after.evict, after.phase) == (pod(0, "old"), Phase.NO_SURGE)
    gap = moves([pod(0, "old", terminating=True)], "new", 1, announced=True)
    assert (gap.evict, gap.phase) == (None, Phase.NO_SURGE)


def test_one_unready_replica_is_replaced_without_a_word_since_nobody_is_served() -> None:
    assert moves([pod(0, "old", ready=False)], "new", 1, announced=False).evict is not None


def test_ready_pods_wait_for_a_slot_and_unready_ones_do_not() -> None:
    queued = moves([pod(0, "old"), pod(1, "old")], "new", 2, has_slot=False)
    assert (queued.evict, queued.phase) == (None, Phase.QUEUED)
    assert queued.wants_slot
    assert moves([pod(0, "old"), pod(1, "old", ready=False)], "new", 2, has_slot=False).evict is not None


def test_nothing_moves_before_the_controller_has_seen_the_template() -> None:
    found = moves([pod(0, "old")], None, 1)
    assert (found.evict, found.phase) == (None, Phase.UNKNOWN)


def test_pods_beyond_the_replicas_are_left_to_the_scale_down() -> None:
    found = moves([pod(0, "new"), pod(1, "old")], "new", 1)
    assert (found.evict, found.phase) == (None, Phase.STARTING)


@pytest.mark.parametrize(("now_s", "is_deleted"), [(129.0, False), (161.0, True)])
def test_a_pod_on_a_lost_node_is_force_deleted_after_its_grace(now_s: float, is_deleted: bool) -> None:
    stuck = replace(pod(0, "new", terminating=True), node="lost", gone_by_s=100.0)
    leaving = replace(pod(1, "new", terminating=True), node="fine", gone_by_s=100.0)
    found = next_moves(
        [stuck, leaving],
        "new",
        2,
        is_announced=False,
        has_slot=True,
        lost_nodes={"lost"},
        now_s=now_s,
        lost_node_grace_s=60.0,
    )
    assert list(found.force_delete) == ([stuck] if is_deleted else [])
