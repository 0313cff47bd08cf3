"""Few users: pods that are mostly idle, and what they have done lately keeps nobody waiting."""

from __future__ import annotations

from itertools import islice

from router_support import FP8, LATER_S, chosen, fleet, news, pods, request, send, snapshot

from prism_server.router.fleet import Fleet
from prism_server.router.placement import Reason, explain
from prism_server.router.pods import PodLoad
from prism_server.router.request_keys import RequestKeys

SLOW = PodLoad(ms_per_token=0.3, ms_per_patch=0.04)
"""A card ten times slower than an H200."""


def slow_fleet(num_pods: int) -> Fleet:
    known = fleet(num_pods)
    for pod in pods(num_pods):
        known.apply(pod.uid, news(1, load=SLOW), LATER_S, LATER_S)
    return known


def served(known: Fleet, asked: RequestKeys, now_s: float, cursor: int) -> str:
    """One request, answered in a second, and reported. The pod's uid."""
    decision, ticket = send(known, asked, now_s)
    known.first_byte(ticket, now_s + 1.0)
    known.finish(ticket, now_s + 1.0)
    chains = asked.chains.get(FP8, ())
    known.apply(decision.uid, news(cursor, load=SLOW, chains_added=chains), now_s + 1.5, now_s + 1.5)
    return decision.uid


def test_a_single_user_stays_where_the_pictures_are_also_on_slow_cards() -> None:
    known, asked = slow_fleet(4), request(*range(8))
    asked_at = [served(known, asked, LATER_S + 2.0 * turn, 2 + turn) for turn in range(6)]
    assert len(set(asked_at)) == 1


def test_with_somebody_inside_what_a_pod_did_lately_counts() -> None:
    known, asked = slow_fleet(4), request(*range(8))
    first = served(known, asked, LATER_S, 2)
    idle, busy = LATER_S + 2.0, LATER_S + 2.1
    assert chosen(known, asked, idle).uid == first
    known.apply(first, news(3, load=PodLoad(inside=1)), busy, busy)
    assert case_of(known, asked, first, busy) > 1.0
    assert chosen(known, asked, busy).uid != first


def test_an_idle_pod_in_its_slow_start_gets_its_share_only() -> None:
    known = slow_fleet(3)
    known.set_pods(pods(4), LATER_S)
    known.apply("uid-d", snapshot(load=SLOW), LATER_S, LATER_S)
    asked = (request(*(f"{number}-{i}" for i in range(8))) for number in range(1000))
    first, second = islice((keys for keys in asked if chosen(known, keys).uid == "uid-d"), 2)
    assert served(known, first, LATER_S, 1) == "uid-d"
    again = chosen(known, second, LATER_S + 2.0)
    assert (again.uid != "uid-d", again.reason) == (True, Reason.SPILL)


def test_idle_pods_take_turns_at_requests_without_a_key() -> None:
    known, keyless = fleet(3), RequestKeys(num_tokens=20)
    assert {served(known, keyless, LATER_S + 2.0 * turn, 1 + turn) for turn in range(3)} == {
        "uid-a",
        "uid-b",
        "uid-c",
    }


def case_of(known: Fleet, asked: RequestKeys, uid: str, now_s: float) -> float:
    """The pod's load over what the bound allows."""
    return next(case.load_ratio for case in explain(known, asked, now_s)[1] if case.uid == uid)
