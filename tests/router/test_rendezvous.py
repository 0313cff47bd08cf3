"""Invariants 33 and 34: keys move only when they must, and every router sees the same order."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from prism_server.identity import framed_digest
from prism_server.router.rendezvous import Rendezvous

KEYS = [framed_digest("key", (i,)) for i in range(2000)]
homes = st.lists(st.text(min_size=1, max_size=12), min_size=2, max_size=20, unique=True)


def homes_of(names: list[str], weights: list[float] | None = None) -> list[str]:
    order = Rendezvous(names, weights or [1.0] * len(names))
    return [names[order.order(key)[0]] for key in KEYS]


@settings(max_examples=30, deadline=None)
@given(names=homes, draw=st.randoms(use_true_random=False))
def test_when_a_pod_leaves_only_its_keys_move_and_each_to_its_next_place(names: list[str], draw: random.Random) -> None:
    gone = draw.choice(names)
    rest = [name for name in names if name != gone]
    before, after = Rendezvous(names, [1.0] * len(names)), Rendezvous(rest, [1.0] * len(rest))
    for key in KEYS[:200]:
        order = [names[i] for i in before.order(key)]
        assert [rest[i] for i in after.order(key)] == [name for name in order if name != gone]


def test_when_a_pod_joins_it_gets_its_share_and_no_more() -> None:
    names = [f"pod-{i}" for i in range(7)]
    before, after = homes_of(names), homes_of([*names, "pod-7"])
    moved = [new for old, new in zip(before, after, strict=True) if old != new]
    assert set(moved) == {"pod-7"}
    assert 0.75 < len(moved) / len(KEYS) * 8 < 1.25


def test_the_order_does_not_depend_on_how_the_pods_are_listed() -> None:
    names = [f"pod-{i}" for i in range(9)]
    assert homes_of(names) == homes_of(names[::-1])


def test_a_pod_of_twice_the_pages_gets_twice_the_keys_and_takes_them_from_all() -> None:
    names, weights = [f"pod-{i}" for i in range(4)], [1.0, 1.0, 1.0, 2.0]
    before, after = homes_of(names, [1.0, 1.0, 1.0, 1.000001]), homes_of(names, weights)
    assert 0.85 < after.count("pod-3") / (len(KEYS) * 2 / 5) < 1.15
    assert {new for old, new in zip(before, after, strict=True) if old != new} == {"pod-3"}
