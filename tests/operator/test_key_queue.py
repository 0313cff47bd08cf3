from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from prism_operator.queue import LONGEST_BACK_OFF_S, DueKeys, Key, KeyQueue

A, B = Key("ns", "a"), Key("ns", "b")


def test_a_key_waits_at_most_once_and_the_earlier_time_wins() -> None:
    keys = DueKeys()
    keys.add(A, 5.0)
    keys.add(A, 2.0)
    keys.add(A, 9.0)
    assert (len(keys), keys.next_due_s()) == (1, 2.0)
    assert (keys.take(1.9), keys.take(2.0), keys.take(100.0)) == (None, A, None)


def test_a_key_that_is_worked_on_is_given_out_again_only_afterwards() -> None:
    keys = DueKeys()
    keys.add(A, 0.0)
    assert keys.take(0.0) == A
    keys.add(A, 0.0)
    keys.add(B, 0.0)
    assert (keys.take(0.0), keys.take(0.0), keys.next_due_s()) == (B, None, None)
    keys.done(A)
    assert keys.take(0.0) == A


def test_failures_pause_longer_each_time_and_success_forgets_them() -> None:
    keys = DueKeys(seed=1)
    pauses = []
    for _ in range(12):
        keys.add(A, 0.0)
        assert keys.take(1e9) == A
        pauses.append(keys.failed(A, 0.0))
    assert pauses[0] <= 0.5
    assert LONGEST_BACK_OFF_S / 2 <= pauses[-1] <= LONGEST_BACK_OFF_S
    assert keys.take(1e9) == A
    keys.done(A)
    keys.add(A, 0.0)
    keys.take(1e9)
    assert keys.failed(A, 0.0) <= 0.5


@given(st.lists(st.tuples(st.sampled_from("adft"), st.sampled_from([A, B]), st.floats(0, 10)), max_size=60))
def test_no_key_is_lost_and_none_runs_twice_at_once(steps: list[tuple[str, Key, float]]) -> None:
    keys, running, wanted = DueKeys(seed=0), set[Key](), set[Key]()
    for action, key, time_s in steps:
        if action == "a":
            keys.add(key, time_s)
            wanted.add(key)
        elif action == "t":
            taken = keys.take(time_s)
            if taken is not None:
                assert taken not in running
                running.add(taken)
                wanted.discard(taken)
        elif key in running:
            running.discard(key)
            if action == "f":
                keys.failed(key, time_s)
                wanted.add(key)
            else:
                keys.done(key)
    for key in list(running):
        keys.done(key)
    while (taken := keys.take(1e9)) is not None:
        wanted.discard(taken)
    assert not wanted


def test_a_waiting_worker_wakes_for_new_keys_and_for_due_ones() -> None:
    async def play() -> list[Key]:
        queue = KeyQueue()
        queue.add(B, delay_s=1e6)
        worker = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        queue.add(A)
        first = await asyncio.wait_for(worker, 60)
        queue.add(B, delay_s=0.02)
        return [first, await asyncio.wait_for(queue.take(), 60)]

    assert asyncio.run(play()) == [A, B]
