"""Where requests go, and why."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import pytest
from router_support import (
    BF16,
    FP8,
    FUTURE,
    LATER_S,
    PICTURE_TOKENS,
    chosen,
    feature,
    fleet,
    news,
    pods,
    request,
    send,
    snapshot,
    text_request,
)

from prism_server.router.fleet import Fleet, Ticket
from prism_server.router.placement import Candidate, NoPod, Reason, decide, explain
from prism_server.router.pods import Pod, PodLoad
from prism_server.router.request_keys import RequestKeys, RequestMedium

ASKED = request("x", "y", "z")
CHAIN = ASKED.chains[FP8]


def others(of: Fleet, asked: RequestKeys = ASKED, count: int = 4) -> list[str]:
    """Pods that are not the request's home."""
    home = chosen(of, asked).uid
    return [pod.uid for pod in pods(count) if pod.uid != home]


def test_the_deepest_chain_wins_whatever_the_home() -> None:
    known = fleet(4)
    shallow, deep, _ = others(known)
    known.apply(shallow, news(1, chains_added=CHAIN[:1], features_added=[feature("x")]), 1.0, 1.0)
    known.apply(deep, news(1, chains_added=CHAIN[:2]), 1.0, 1.0)
    decision = chosen(known, ASKED)
    assert (decision.uid, decision.reason, decision.cached_media) == (deep, Reason.CHAIN, 2)
    assert decision.cached_tokens == 2 * PICTURE_TOKENS


def test_encoder_outputs_count_apart_from_kv() -> None:
    known = fleet(4)
    uid = others(known)[0]
    known.apply(uid, news(1, features_added=[feature("y"), feature("z")]), 1.0, 1.0)
    decision = chosen(known, ASKED)
    assert (decision.uid, decision.reason) == (uid, Reason.FEATURES)
    assert (decision.cached_media, decision.cached_features, decision.cached_tokens) == (0, 2, 0)


def test_a_request_whose_media_another_is_computing_goes_to_that_pod() -> None:
    known = fleet(4)
    home, ticket = send(known, ASKED)
    same_pictures_other_question = chosen(known, request("x", "y", "z"))
    assert (same_pictures_other_question.uid, same_pictures_other_question.reason) == (home.uid, Reason.COMPUTING)
    known.finish(ticket, LATER_S)
    assert chosen(known, ASKED).reason == Reason.HOME


def test_same_question_other_picture_is_no_hot_spot_and_same_picture_other_question_does_not_scatter() -> None:
    known = fleet(4)
    homes = Counter(chosen(known, request(number)).uid for number in range(400))
    assert max(homes.values()) < 1.35 * 100
    assert len({chosen(known, request("same")).uid for _ in range(20)}) == 1


def test_several_routers_that_share_no_state_agree_on_a_cold_keys_home() -> None:
    routers = [fleet(5) for _ in range(3)]
    routers[1].set_pods(reversed(pods(5)), 1.0)  # told in another order
    tickets = [send(routers[2], request(("warm", number)))[1] for number in range(4)]  # busy with something else
    for number in range(50):
        assert len({chosen(router, request(number)).uid for router in routers}) == 1
    assert len(tickets) == 4


def test_when_a_pod_leaves_only_its_keys_get_another_home() -> None:
    known = fleet(5)
    before = {number: chosen(known, request(number)).uid for number in range(200)}
    known.set_pods([Pod(pod.name, pod.uid, is_terminating=pod.uid == "uid-c") for pod in pods(5)], LATER_S)
    after = {number: chosen(known, request(number)).uid for number in range(200)}
    assert all(after[number] == uid for number, uid in before.items() if uid != "uid-c")
    assert "uid-c" not in after.values()


def test_a_pod_that_comes_back_under_its_name_is_the_home_of_the_same_keys() -> None:
    known = fleet(5)
    before = [chosen(known, request(number)).name for number in range(100)]
    known.set_pods([Pod(pod.name, f"{pod.uid}-again") for pod in pods(5)], LATER_S)
    assert [chosen(known, request(number)).name for number in range(100)] == before


@pytest.mark.parametrize("state", [{"is_ready": False}, {"is_terminating": True}])
def test_a_pod_that_is_going_or_not_ready_gets_nothing_new(state: dict[str, bool]) -> None:
    known = fleet(2)
    known.apply("uid-a", news(1, chains_added=CHAIN), 1.0, 1.0)
    known.set_pods([Pod("a", "uid-a", **state), Pod("b", "uid-b")], LATER_S)
    assert chosen(known, ASKED).uid == "uid-b"
    known.set_pods(pods(2), LATER_S)
    assert chosen(known, ASKED, LATER_S + 60).uid == "uid-a"  # what it holds was not forgotten


def test_a_pod_that_says_it_drains_gets_nothing_new() -> None:
    known = fleet(2)
    known.apply("uid-a", snapshot(CHAIN, load=PodLoad(is_draining=True)), 1.0, 1.0)
    assert chosen(known, ASKED).uid == "uid-b"


def test_a_429_keeps_requests_away_until_its_time_is_over() -> None:
    known = fleet(4)
    home = chosen(known, ASKED).uid
    known.refused(home, 3.0, LATER_S)
    decision = chosen(known, ASKED, LATER_S + 2.9)
    assert (decision.uid != home, decision.reason) == (True, Reason.SPILL)
    assert chosen(known, ASKED, LATER_S + 3.0).uid == home


def test_a_pod_that_is_full_gets_nothing_until_somebody_leaves() -> None:
    known = fleet(2)
    for uid in ("uid-a", "uid-b"):
        known.apply(uid, snapshot(load=PodLoad(max_inside=1)), 1.0, 1.0)
    tickets = [send(known, request(number))[1] for number in range(2)]
    assert decide(known, ASKED, LATER_S) == NoPod("saturated", 1.0)
    known.finish(tickets[0], LATER_S)
    assert chosen(known, ASKED)


def test_nobody_is_a_reason_too() -> None:
    assert decide(Fleet(), ASKED, 0.0) == NoPod("no_pods", 1.0)
    known = fleet(2)
    assert decide(known, ASKED, LATER_S, frozenset({"uid-a", "uid-b"})) == NoPod("excluded", 1.0)
    known.refused("uid-a", 30.0, LATER_S)
    known.refused("uid-b", 20.0, LATER_S)
    assert decide(known, ASKED, LATER_S) == NoPod("saturated", 20.0)


def test_a_second_try_never_goes_to_the_same_pod() -> None:
    known, tried = fleet(3), set[str]()
    for _ in range(3):
        tried.add(chosen(known, ASKED, excluded=tried).uid)
    assert len(tried) == 3


def test_spill_goes_down_the_keys_own_order() -> None:
    known = fleet(5)
    _, candidates = explain(known, ASKED, LATER_S)
    order = [candidate.uid for candidate in candidates]
    assert [candidate.order for candidate in candidates] == list(range(5))
    for place, uid in enumerate(order[:-1]):
        known.refused(uid, 60.0, LATER_S)
        assert chosen(known, ASKED).uid == order[place + 1]


def hammered(known: Fleet, asked: list[RequestKeys], inside: int) -> Counter[str]:
    """Requests one after the other, `inside` of them under way at any time; how many each pod got."""
    tickets, got, now_s = list[tuple[str, Ticket, RequestKeys]](), Counter[str](), LATER_S
    for number, keys in enumerate(asked):
        now_s += 0.01
        decision, ticket = send(known, keys, now_s)
        got[decision.uid] += 1
        tickets.append((decision.uid, ticket, keys))
        if len(tickets) > inside:
            uid, done, made = tickets.pop(0)
            known.first_byte(done, now_s)
            known.finish(done, now_s)
            cursor = known.position(uid)
            assert cursor is not None
            known.apply(uid, news(number + 1, chains_added=made.chains[FP8]), now_s, now_s)
    return got


def test_a_hot_picture_gets_copies_and_no_pod_more_than_the_bound() -> None:
    got = hammered(fleet(4), [request("hot") for _ in range(3000)], inside=24)
    assert len(got) == 4
    assert max(got.values()) <= 1.25 * 3000 / 4


def test_a_few_requests_for_one_picture_stay_together() -> None:
    assert len(hammered(fleet(4), [request("only") for _ in range(50)], inside=2)) == 1


def test_a_pod_far_behind_with_its_work_is_passed_over_for_cold_keys() -> None:
    known = fleet(4)
    home = chosen(known, ASKED).uid
    known.apply(home, snapshot(load=PodLoad(uncached_tokens=50_000)), LATER_S, LATER_S)
    assert chosen(known, ASKED).reason == Reason.SPILL
    assert chosen(known, ASKED, LATER_S + 60).uid == home  # by then it has done that work


def test_a_new_pod_gets_a_small_share_at_first_and_a_whole_one_later() -> None:
    def share(age_s: float) -> float:
        known = fleet(3)
        known.set_pods(pods(4), LATER_S - age_s)
        known.apply("uid-d", snapshot(), LATER_S, LATER_S)
        return hammered(known, [request(number) for number in range(600)], inside=40)["uid-d"] / 600

    assert share(0.0) < 0.15
    assert share(60.0) > 0.2


def test_requests_without_a_key_do_not_herd_on_a_new_pod_that_has_nothing_to_do() -> None:
    known, keyless = fleet(3), RequestKeys(num_tokens=20)
    for uid in ("uid-a", "uid-b", "uid-c"):  # each has 46 ms of work, less than anybody moves for
        known.apply(uid, snapshot(load=PodLoad(inside=8, uncached_tokens=1000)), LATER_S, LATER_S)
    known.set_pods(pods(4), LATER_S)
    known.apply("uid-d", snapshot(), LATER_S, LATER_S)
    got = [send(known, keyless, LATER_S)[0].uid for _ in range(12)]
    assert got.count("uid-d") < 4
    for uid in ("uid-a", "uid-b", "uid-c"):  # now nobody else has room for a long time
        known.apply(uid, snapshot(load=PodLoad(inside=8, uncached_tokens=100_000)), LATER_S + 1, LATER_S + 1)
    assert chosen(known, keyless, LATER_S + 1).uid == "uid-d"


def test_a_huge_request_that_its_pod_refuses_is_load_only_while_it_is_there() -> None:
    known = fleet(4)
    decision, ticket = send(known, text_request("huge", num_tokens=10_000_000))
    there = load_of(known, decision.uid, LATER_S)
    assert there.wait_ms > 100_000
    assert there.load_ratio > 1.0
    known.finish(ticket, LATER_S + 0.05)
    gone = load_of(known, decision.uid, LATER_S + 0.05)
    assert gone.wait_ms < 1.0
    assert gone.load_ratio <= 1.0
    known.apply(decision.uid, news(1, load=PodLoad(uncached_tokens=100)), LATER_S - 0.01, LATER_S + 0.06)
    assert load_of(known, decision.uid, LATER_S + 0.06).wait_ms < 10.0  # nor does a report from before it


def load_of(known: Fleet, uid: str, now_s: float) -> Candidate:
    """The pod's case for a request that nobody holds anything of."""
    return next(case for case in explain(known, request("none"), now_s)[1] if case.uid == uid)


def test_the_same_state_gives_the_same_decision_and_deciding_changes_nothing() -> None:
    known, twin = fleet(4), fleet(4)
    for number in range(60):
        keys = request(number % 7, number % 3)
        first = decide(known, keys, LATER_S + number / 100)
        assert explain(known, keys, LATER_S + number / 100)[0] == first == decide(twin, keys, LATER_S + number / 100)
        for of in (known, twin):
            send(of, keys, LATER_S + number / 100)


def test_text_goes_where_its_beginning_was() -> None:
    known = fleet(4)
    first, ticket = send(known, text_request("contract"))
    known.first_byte(ticket, LATER_S)
    known.finish(ticket, LATER_S)
    again = chosen(known, text_request("contract"), LATER_S + 1)
    assert (again.uid, again.reason, again.cached_tokens) == (first.uid, Reason.TEXT, 1000)
    assert len({chosen(known, text_request(str(number))).uid for number in range(40)}) == 4


def test_text_without_a_beginning_worth_a_home_goes_to_the_least_loaded() -> None:
    known = fleet(3)
    for uid in ("uid-a", "uid-b"):
        known.apply(uid, snapshot(load=PodLoad(inside=3, uncached_tokens=9000)), LATER_S, LATER_S)
    decision = chosen(known, RequestKeys(num_tokens=20))
    assert (decision.uid, decision.reason) == ("uid-c", Reason.LEAST_LOADED)


def test_during_a_rollout_with_mixed_kv_types_no_hit_is_expected_that_cannot_be() -> None:
    known = fleet(2)
    known.apply("uid-b", snapshot(scheme=BF16), 1.0, 1.0)
    keys = request("x", "y", schemes=known.schemes)
    known.apply("uid-b", news(1, scheme=BF16, chains_added=keys.chains[FP8]), 2.0, 2.0)  # not its own keys
    assert all(candidate.cached_media == 0 for candidate in explain(known, keys, LATER_S)[1])
    known.apply("uid-b", news(2, scheme=BF16, chains_added=keys.chains[BF16]), 3.0, 3.0)
    assert (chosen(known, keys).uid, chosen(known, keys).cached_media) == ("uid-b", 2)


def test_pods_of_an_unknown_key_version_are_placed_by_rendezvous_and_load_and_counted() -> None:
    plain, future = fleet(4), fleet(4, scheme=FUTURE)
    keys = request("x", schemes=future.schemes)
    assert keys.chains == {}
    future.apply("uid-a", news(1, scheme=FUTURE, features_added=[feature("x")]), 1.0, 1.0)
    assert chosen(future, keys).uid == chosen(plain, request("x")).uid
    assert chosen(future, keys).cached_features == 0
    send(future, keys)
    assert (future.stats().unknown_key_decisions, future.stats().unknown_key_pods_now) == (1, 4)
    assert future.stats().expected_now == 0


def test_before_the_first_poll_keys_have_their_homes() -> None:
    young = Fleet()
    young.set_pods(pods(4), 0.0)
    assert chosen(young, request("x", schemes=())).uid == chosen(fleet(4), request("x")).uid


def test_the_explanation_has_every_candidates_case() -> None:
    known = fleet(3)
    known.apply("uid-b", news(1, chains_added=CHAIN), 1.0, 1.0)
    decision, candidates = explain(known, ASKED, LATER_S)
    assert {candidate.name for candidate in candidates} == {"a", "b", "c"}
    best = next(candidate for candidate in candidates if candidate.uid == "uid-b")
    assert best.cached_media == 3
    assert all(best.own_ms < candidate.own_ms for candidate in candidates if candidate.uid != "uid-b")
    assert decision == chosen(known, ASKED)


def test_a_long_silence_upsets_no_sum() -> None:
    known = fleet(2)
    for days in itertools.accumulate([0.0, 0.001, 1.0, 30.0, 365.0]):
        _, ticket = send(known, ASKED, LATER_S + days * 86_400)
        known.finish(ticket, LATER_S + days * 86_400)
    assert known.stats().in_flight_now == 0


def test_a_stall_that_shows_in_one_pods_costs_does_not_send_questions_away_from_their_small_pictures() -> None:
    known = fleet(2)
    small = replace(request("s"), media=(RequestMedium(feature("s"), 9, 36),), tokens_before=(9,), num_tokens=29)
    other = chosen(known, small).uid  # home: where a copy would be made
    holder = next(pod.uid for pod in pods(2) if pod.uid != other)
    measured = {
        holder: PodLoad(ms_per_token=12.0, ms_per_patch=0.3),
        other: PodLoad(ms_per_token=0.5, ms_per_patch=0.3),
    }
    for uid, load in measured.items():
        known.apply(uid, snapshot(small.chains[FP8] if uid == holder else (), load=load), LATER_S, LATER_S)
    assert chosen(known, small, LATER_S + 1).uid == holder
