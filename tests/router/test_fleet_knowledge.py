"""What a router believes about pods: reports, expectations, and how both end."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_support import BF16, FP8, LATER_S, chosen, feature, fleet, news, pods, request, send, snapshot

from prism_server.identity import LinkContent
from prism_server.router.fleet import Fleet, Position, Ticket
from prism_server.router.knowledge import ExpectedKeys, KeyIndex, slots_of
from prism_server.router.load import OLDEST_REPORT_S, Backlog
from prism_server.router.placement import Reason
from prism_server.router.pods import Pod, PodLoad

ASKED = request("x", "y", "z")
CHAIN = ASKED.chains[FP8]


def away_from_home(of: Fleet) -> str:
    """A pod that is not the request's home."""
    home = chosen(of, ASKED).uid
    return next(pod.uid for pod in pods(4) if pod.uid != home)


def test_a_snapshot_replaces_all_that_was_known() -> None:
    known = fleet(4)
    uid = away_from_home(known)
    known.apply(uid, snapshot(CHAIN), 1.0, 1.0)
    assert chosen(known, ASKED).uid == uid
    known.apply(uid, snapshot([feature("other")], cursor=7), 2.0, 2.0)
    assert chosen(known, ASKED).reason == Reason.HOME
    assert known.position(uid) == Position("first", 7)


def test_changes_are_followed_key_by_key() -> None:
    known = fleet(4)
    uid = away_from_home(known)
    known.apply(uid, news(1, chains_added=CHAIN), 1.0, 1.0)
    assert chosen(known, ASKED).cached_media == 3
    known.apply(uid, news(2, chains_evicted=CHAIN[2:]), 2.0, 2.0)
    assert (chosen(known, ASKED).uid, chosen(known, ASKED).cached_media) == (uid, 2)
    known.apply(uid, news(3, chains_evicted=CHAIN[:2]), 3.0, 3.0)
    assert chosen(known, ASKED).reason == Reason.HOME


def test_a_pod_restarted_in_place_is_not_preferred_for_what_it_no_longer_holds() -> None:
    known = fleet(4)
    uid = away_from_home(known)
    known.apply(uid, snapshot(CHAIN, [feature("x")]), 1.0, 1.0)
    known.apply(uid, snapshot(epoch="second"), 2.0, 2.0)
    assert chosen(known, ASKED).reason == Reason.HOME
    assert known.stats().chains_now == known.stats().features_now == 0
    assert known.stats().epochs_lost == 1


def test_changes_of_an_unknown_epoch_teach_nothing_and_the_next_poll_asks_for_a_snapshot() -> None:
    known = fleet(4)
    uid = away_from_home(known)
    known.apply(uid, news(9, epoch="second", chains_added=CHAIN), 1.0, 1.0)
    assert known.position(uid) is None
    assert chosen(known, ASKED).reason == Reason.HOME


def test_an_answer_that_was_overtaken_changes_nothing() -> None:
    known = fleet(2)
    known.apply("uid-a", news(5, chains_added=CHAIN), 1.0, 1.0)
    known.apply("uid-a", news(4, chains_evicted=CHAIN), 0.9, 1.1)
    assert known.stats().chains_now == 3


def test_another_uid_under_the_same_name_holds_nothing() -> None:
    known = fleet(2)
    known.apply("uid-a", news(1, chains_added=CHAIN), 1.0, 1.0)
    known.set_pods([Pod("a", "uid-new"), Pod("b", "uid-b")], 2.0)
    assert known.stats().chains_now == 0
    assert known.position("uid-new") is None
    known.apply("uid-a", news(2, chains_added=CHAIN), 2.0, 2.0)  # an answer that was still under way
    assert known.stats().chains_now == 0


def test_other_keys_of_a_pod_make_its_old_ones_worthless() -> None:
    known = fleet(2)
    known.apply("uid-a", news(1, chains_added=CHAIN), 1.0, 1.0)
    known.apply("uid-a", snapshot(scheme=BF16), 2.0, 2.0)
    assert known.stats().chains_now == 0
    assert set(known.schemes) == {FP8, BF16}


def test_a_router_younger_than_the_pods_knows_all_after_their_first_answers() -> None:
    old, young = fleet(4), Fleet()
    uid = away_from_home(old)
    for known in (old, young):
        known.set_pods(pods(4), 0.0)
        for pod in pods(4):
            known.apply(pod.uid, snapshot(CHAIN if pod.uid == uid else ()), 0.0, 0.0)
    assert chosen(young, ASKED) == chosen(old, ASKED)


def test_what_is_under_way_is_expected_until_the_pod_has_had_time_to_report_it() -> None:
    known = fleet(4)
    decision, ticket = send(known, ASKED, 100.0)
    assert chosen(known, ASKED, 100.1).reason == Reason.COMPUTING
    known.first_byte(ticket, 101.0)
    known.apply(decision.uid, news(1), 101.0, 101.01)  # asked before the pod can have said it
    assert chosen(known, ASKED, 101.1).reason == Reason.COMPUTING
    known.apply(decision.uid, news(2), 101.5, 101.51)  # it has had its chance
    assert chosen(known, ASKED, 101.6).reason == Reason.HOME
    known.finish(ticket, 102.0)
    assert known.stats().expected_now == 0


def test_a_report_confirms_what_was_expected() -> None:
    known = fleet(4)
    decision, ticket = send(known, ASKED, 100.0)
    known.first_byte(ticket, 101.0)
    known.apply(decision.uid, news(1, chains_added=CHAIN), 101.5, 101.51)
    known.finish(ticket, 102.0)
    assert chosen(known, ASKED, 102.0).reason == Reason.CHAIN
    assert known.stats().expected_now == 0


def test_without_reports_expectations_expire() -> None:
    known = fleet(4)
    _, ticket = send(known, ASKED, 100.0)
    known.first_byte(ticket, 101.0)
    known.finish(ticket, 102.0)
    for pod in pods(4)[:1]:  # another pod's answer: its own never comes
        known.apply(pod.uid, news(1), 107.0, 107.0)
    assert known.stats().expected_now == 0


def test_expectations_of_pods_that_never_report_again_do_not_gather() -> None:
    known = fleet(1)
    for number in range(100):
        _, ticket = send(known, request(number), LATER_S + number)
        known.first_byte(ticket, LATER_S + number)
        known.finish(ticket, LATER_S + number)
    assert known.stats().expected_now < 20


def test_a_request_that_fails_takes_its_expectations_along_and_leaves_those_of_others() -> None:
    known = fleet(4)
    _, first = send(known, ASKED, 100.0)
    _, second = send(known, ASKED, 100.0)
    known.finish(first, 100.5)
    assert chosen(known, ASKED, 100.6).reason == Reason.COMPUTING
    known.finish(second, 100.7)
    assert chosen(known, ASKED, 100.8).reason == Reason.HOME
    assert known.stats().expected_now == 0


def test_a_restart_ends_expectations_and_late_events_do_not_bring_them_back() -> None:
    known = fleet(4)
    decision, ticket = send(known, ASKED, 100.0)
    known.apply(decision.uid, snapshot(epoch="second"), 100.5, 100.5)
    assert chosen(known, ASKED, 100.6).reason == Reason.HOME
    _, again = send(known, ASKED, 100.7)
    known.finish(ticket, 100.8)
    assert chosen(known, ASKED, 100.9).reason == Reason.COMPUTING
    known.finish(again, 101.0)
    assert known.stats().expected_now == known.stats().in_flight_now == 0


steps = st.lists(st.tuples(st.sampled_from(["send", "byte", "finish", "restart", "leave", "poll"]), st.integers(0, 30)))


@settings(max_examples=150, deadline=None)
@given(steps=steps)
def test_the_in_flight_counters_return_to_zero_after_any_mix_of_events(steps: list[tuple[str, int]]) -> None:
    known, tickets, now_s = fleet(3), list[Ticket](), 100.0
    for number, (step, which) in enumerate(steps):
        now_s += 0.3
        ticket = tickets[which % len(tickets)] if tickets else None
        uid = pods(3)[which % 3].uid
        if step == "send":
            tickets.append(send(known, request(which % 5, which % 3), now_s)[1])
        elif step == "byte" and ticket:
            known.first_byte(ticket, now_s)
        elif step == "finish" and ticket:
            known.finish(ticket, now_s)
        elif step == "restart":
            known.apply(uid, snapshot(epoch=f"epoch-{number}"), now_s, now_s)
        elif step == "leave":
            known.set_pods([pod for pod in pods(3) if pod.uid != uid], now_s)
            known.set_pods(pods(3), now_s)
        elif step == "poll" and (position := known.position(uid)):
            known.apply(uid, news(position.cursor + 1, epoch=position.epoch), now_s, now_s)
    for ticket in tickets:
        known.finish(ticket, now_s)
    for pod in pods(3):
        known.apply(pod.uid, snapshot(epoch="last"), now_s + 10, now_s + 10)
    assert known.stats().in_flight_now == known.stats().expected_now == 0
    assert [known.in_flight(pod.uid) for pod in pods(3)] == [0, 0, 0]


def test_what_was_sent_long_ago_is_in_every_report() -> None:
    """And is not kept: a pod may never report."""
    backlog = Backlog()
    backlog.add(50_000.0, LATER_S)
    backlog.add(10.0, LATER_S + OLDEST_REPORT_S + 1)
    backlog.report(0.0, LATER_S - 1, LATER_S + OLDEST_REPORT_S + 1)
    assert backlog.busy_until_s == pytest.approx(LATER_S - 1 + 0.010)


def test_links_are_learnt_and_bounded() -> None:
    known = fleet(1, max_links=2)
    answer = news(1, links=tuple(LinkContent(feature(f"link{i}"), feature(i)) for i in range(3)))
    known.apply("uid-a", answer, 1.0, 1.0)
    assert [known.content_of(feature(f"link{i}")) for i in range(3)] == [None, feature(1), feature(2)]
    assert known.stats().links_now == 2


def test_memory_is_bounded_whatever_a_pod_reports() -> None:
    known = fleet(1, max_chains_per_pod=2)
    known.apply("uid-a", news(1, chains_added=CHAIN), 1.0, 1.0)
    assert (known.stats().chains_now, known.stats().dropped_keys) == (2, 1)
    assert chosen(known, ASKED).cached_media == 3  # the youngest stay


def test_load_comes_from_the_same_answer() -> None:
    known = fleet(2)
    busy = PodLoad(inside=9, uncached_tokens=100_000)
    known.apply("uid-a", snapshot(load=busy), LATER_S, LATER_S)
    assert chosen(known, request()).uid == "uid-b"
    assert known.answer_age_s("uid-a", LATER_S + 2) == pytest.approx(2.0)


@given(changes=st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 9)), max_size=80))
def test_the_index_agrees_with_a_set_for_every_pod(changes: list[tuple[bool, int, int]]) -> None:
    index, model = KeyIndex(100), [set[int]() for _ in range(4)]
    for is_added, slot, number in changes:
        (index.add if is_added else index.remove)(slot, (feature(number),))
        (model[slot].add if is_added else model[slot].discard)(number)
    for number in range(10):
        assert set(slots_of(index.holders(feature(number)))) == {s for s in range(4) if number in model[s]}
    index.clear(2)
    assert index.num_keys(2) == 0
    assert len(index) == len(set.union(*(model[s] for s in (0, 1, 3))))


def test_an_expectation_outlives_its_report_while_another_request_makes_it() -> None:
    expected, key = ExpectedKeys(), feature("k")
    expected.begin(0, (key,))
    expected.begin(0, (key,))
    expected.made(0, (key,), 1.0)
    expected.settle(0, 2.0)
    assert expected.holders(key) == 1
    expected.given_up(0, (key,))
    assert len(expected) == expected.holders(key) == 0
