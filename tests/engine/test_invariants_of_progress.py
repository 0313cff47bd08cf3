"""INVARIANTS, sections B and C: progress, encoder and preparation. Each test is named by its sentence."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from simulation import Sizes, World
from test_invariants_of_pages import ask, make_world, settle
from test_simulated_scheduler import random_move

from prism_server.engine.cost_model import Observation
from prism_server.engine.sequence import Phase, Sequence
from prism_server.errors import BadRequest


def step_with_media(world: World) -> None:
    while world.pending_media:
        world.media_arrives(0)
    world.step()


def test_if_there_is_work_a_step_computes_a_token_or_an_encoder_item_or_refuses_with_a_reason() -> None:
    for num_pages in range(1, 9):
        for seed in range(20):
            rng = random.Random(seed)
            world = World(Sizes(num_pages=num_pages, page_tokens=2, feature_tokens=5, depth=0), rng)
            for _ in range(6):
                world.add(world.make_request(["ab" * rng.randint(1, 3), rng.randrange(3), "c"], rng.randint(1, 4)))
            world.drain()  # fails when a step finds nothing to do although there is work


def test_pages_that_were_promised_twice_stop_nobody() -> None:
    """Where admission lets too many in, the oldest that can run takes pages and pins from the others."""
    for seed in range(100):
        rng = random.Random(seed)
        world = World(replace(Sizes.draw(rng), overcommit=True), rng)
        for _ in range(150):
            random_move(world, rng)
        world.executor.failing.clear()
        world.drain()


def test_a_request_larger_than_the_pool_the_context_or_the_encoder_budget_is_refused_at_admission() -> None:
    cases: list[tuple[int, list[int | str], list[int | str], tuple[str, str]]] = [
        (4, ["a" * 12], ["a" * 13], ("13 tokens", "4 pages")),
        (40, ["a" * 63], ["a" * 64], ("64 tokens", "context holds 64")),
        (40, ["a", 0], ["a", 1], ("90 bytes", "80 bytes")),
    ]
    for num_pages, just_fits, too_large, figures in cases:
        world = make_world(items=(8, 9), num_pages=num_pages, page_tokens=3, feature_tokens=8)
        request = world.make_request(too_large)
        with pytest.raises(BadRequest) as refused:
            world.scheduler.add([Sequence(999, request, 0, 0, 4)])
        assert refused.value.param == "messages"
        assert all(figure in refused.value.reason for figure in figures), refused.value.reason
        assert not world.scheduler.has_work
        ask(world, just_fits)


def test_a_full_pool_with_an_unfinished_prefill_and_no_appendable_decoder_continues_the_prefill() -> None:
    world = make_world(num_pages=6, page_tokens=2, chunk_tokens=2, depth=0, max_running=3)
    (oldest,) = world.add(world.make_request(["abcabcabc"], max_tokens=2, ignore_eos=True)) or []
    world.step()
    others = [(world.add(world.make_request([text], 6, ignore_eos=True)) or [])[0] for text in ("d", "e")]
    while oldest.phase is Phase.PREFILL:
        before = oldest.num_planned
        world.step()
        world.step()  # the first of two may find every younger one already in its plan
        assert oldest.num_planned > before
    settle(world)
    assert all(other.phase is Phase.FINISHED for other in others)


def test_waiting_requests_hold_no_encoder_output() -> None:
    world = make_world(items=(4, 4, 4), num_pages=5, page_tokens=3, feature_tokens=4, max_running=4)
    for number in range(3):
        world.add(world.make_request(["a" * (number + 1), number, "b"], max_tokens=3, ignore_eos=True))
    while world.scheduler.has_work:
        step_with_media(world)  # `check` looks at the pins of everyone who waits
    assert world.scheduler.counters["encoded_items"] >= 3


def test_an_encoder_cache_of_one_item_still_serves_interleaved_requests_of_two_with_preemption_in_the_middle() -> None:
    preempted = preempted_with_pins = 0
    for seed in range(60):
        rng = random.Random(seed)
        sizes = Sizes(num_pages=12, page_tokens=2, feature_tokens=4, chunk_tokens=rng.choice([0, 1, 3]), max_running=3)
        world = World(sizes, rng)
        world.items = [world.make_item(f"item {number}", 4) for number in range(6)]
        sequences = []
        for number in range(3):
            first, second = 2 * number, 2 * number + 1
            again: list[int | str] = [first, "d"] if seed % 2 else []  # holds its pin until then, or makes way
            parts: list[int | str] = ["a" * (number + 1), first, "b", second, "c", *again]
            added = world.add(world.make_request(parts, max_tokens=2, ignore_eos=True))
            assert added is not None, "the pool of the least size holds each of them"
            sequences += added
        for _ in range(rng.randint(0, 12)):
            step_with_media(world)
        running = [sequence for sequence in world.scheduler.running if sequence.phase is Phase.PREFILL]
        victim = next((sequence for sequence in running if sequence.pins), running[-1] if running else None)
        if victim is not None:
            preempted += 1
            preempted_with_pins += bool(victim.pins)
            world.scheduler.preempt(victim)
            assert not world.features.pinned_by(victim.number)
        world.drain()
        assert all(sequence.phase is Phase.FINISHED for sequence in sequences)
        for sequence in sequences:
            for facts in {span.facts for span in sequence.spans}:
                encoded = world.executor.encodes[facts.key]
                assert 1 <= encoded <= 1 + sequence.preemptions + sequence.lost_pins
    assert preempted > 20
    assert preempted_with_pins > 5


def test_a_cancelled_prefill_gives_its_pages_back_once_emits_one_final_event_and_costs_its_mates_no_token() -> None:
    for moment in range(12):
        world = make_world(page_tokens=2, chunk_tokens=2, max_running=4, depth=1)
        mate = world.make_request(["abcab"], max_tokens=10, ignore_eos=True)
        world.add(mate)
        victim = world.make_request(["de", 0, "abcabc", 1, "abc"], max_tokens=4)
        (sequence,) = world.add(victim) or []
        for _ in range(moment):
            step_with_media(world)
        world.cancel(victim.request_id)
        world.cancel(victim.request_id)
        settle(world)
        assert world.final[sequence.number] == 1
        assert world.emitted[world.requests[mate.request_id][0].number] == world.oracle[mate.request_id]
        world.check_idle()


def test_after_any_load_everything_is_empty_and_every_page_is_free_or_evictable() -> None:
    many = (4, 3, 2) * 4  # so many that one is often nobody's but the one's who is cancelled
    world = make_world(items=many, num_pages=10, page_tokens=3, host_slots=4, feature_tokens=5)
    rng, sizes = random.Random(8), []
    for _ in range(6):
        for _ in range(40):
            if len(world.live_requests()) < 8:
                item = rng.randrange(len(many))
                world.add(world.make_request([rng.choice("abcde"), item, rng.choice("abc") * 3], 4, n=2))
            if world.pending_media and rng.random() < 0.5:
                world.media_arrives(0)
            if rng.random() < 0.4 and world.live_requests():  # also between an item's arrival and its encoding
                world.cancel(rng.choice(world.live_requests()))
            world.step()
        world.drain()
        scheduler = world.scheduler
        held = (scheduler.running, scheduler.waiting, scheduler.parked, scheduler.in_flight._leaders)
        assert not any(held)
        sizes.append(len(scheduler.desk._pending) + len(scheduler.desk._staged) + len(world.executor.features))
    assert max(sizes) <= len(world.items), "something grows with the number of requests served"


def test_the_encoder_never_runs_before_admission() -> None:
    world = make_world(num_pages=6, page_tokens=2, max_running=1)
    world.add(world.make_request(["abc"], max_tokens=6, ignore_eos=True))
    (waiting,) = world.add(world.make_request(["de", 0, "a"], max_tokens=1)) or []
    while waiting.phase is Phase.WAITING:
        step_with_media(world)
        if waiting.phase is Phase.WAITING:
            assert not world.executor.encodes
            assert not world.scheduler.counters["decoded_items"]
    settle(world)
    assert sum(world.executor.encodes.values()) == 1


def test_a_refused_request_leaves_its_counters_unchanged() -> None:
    world = make_world(num_pages=4, page_tokens=2)
    ask(world, ["abc"], max_tokens=1)
    before = dict(world.scheduler.counters)
    assert world.add(world.make_request(["a" * 20])) is None  # `add` compares the counters, too
    assert dict(world.scheduler.counters) == before


def test_concurrent_requests_for_one_item_prepare_it_once() -> None:
    world = make_world(num_pages=60, page_tokens=3, max_running=8)
    for text in "abcde":  # no two share a prefix: none of them waits for another's
        world.add(world.make_request([text, 0, "a"], max_tokens=1))
    world.step()
    assert world.pending_media == [world.items[0][1].key]
    settle(world)
    assert sum(world.executor.encodes.values()) == world.scheduler.counters["decoded_items"] == 1


def test_an_item_that_is_shown_twice_in_one_prompt_is_prepared_and_encoded_once() -> None:
    world = make_world(page_tokens=3)
    sequence = ask(world, ["ab", 0, "c", 0, "ab"])
    assert (sequence.decoded_items, sequence.encoded_items, sequence.prefilled_media_tokens) == (1, 1, 8)


def test_a_cold_prefill_that_runs_already_leaves_room_in_the_same_step_for_a_hot_newcomer() -> None:
    world = make_world(items=(4,), num_pages=64, page_tokens=4, max_running=4, max_step_tokens=8)
    ask(world, ["ab", 0, "c"])
    (cold,) = world.add(world.make_request(["e" * 40], max_tokens=1, ignore_eos=True)) or []
    world.step()
    before = cold.num_planned
    (hot,) = world.add(world.make_request(["ab", 0, "d"], max_tokens=1, ignore_eos=True)) or []
    world.step()
    assert hot.num_planned == hot.prompt_tokens
    assert cold.num_planned > before, "and goes on itself"


def test_a_hot_suffix_is_packed_into_a_step_before_a_cold_chunk_and_nobody_starves() -> None:
    world = make_world(items=(4,), num_pages=64, page_tokens=4, max_running=8, chunk_tokens=4, max_step_tokens=8)
    ask(world, ["ab", 0, "c"])
    (cold,) = world.add(world.make_request(["e" * 40], max_tokens=1, ignore_eos=True)) or []
    world.step()
    (hot,) = world.add(world.make_request(["ab", 0, "d"], max_tokens=1, ignore_eos=True)) or []
    while hot.phase is not Phase.FINISHED:
        world.step()
    assert cold.phase is Phase.PREFILL, "the hot one did not wait for the cold one"
    while cold.phase is not Phase.FINISHED:  # hot ones keep coming; after the ageing time the cold one goes first
        world.add(world.make_request(["ab", 0, "d" * 3], max_tokens=1))
        step_with_media(world)
        assert world.num_steps < 2000


def test_pixels_stay_until_their_item_is_encoded_whoever_else_asked_for_them_leaves() -> None:
    """Half a picture through the tower is worth nothing without its pixels: the rest could not be encoded."""
    halves = 0
    for moment in range(12):
        world = make_world(items=(4,), num_pages=32, feature_tokens=4, max_running=4, chunk_tokens=2, depth=1)
        ask(world, ["a", 0, "b"])
        world.add(world.make_request(["e"], max_tokens=50, ignore_eos=True))  # beside decodes a step has a budget
        first = world.make_request(["abcdea", 0, "e"], max_tokens=2, ignore_eos=True)
        world.add(first)  # admitted while the features are there: it asks for no pixels
        world.step()
        world.scheduler.features.clear()
        second = world.make_request(["cd" * 12, 0, "d"], max_tokens=2)
        world.add(second)
        slow = Observation(0, 0, 48, 0.0, 300.0, eager=False)  # a step has time for one block
        world.scheduler.cost.observe(slow)
        for _ in range(moment):
            step_with_media(world)
        halves += bool(world.features.half_encoded())
        world.cancel(second.request_id)
        settle(world)
        assert world.emitted[world.requests[first.request_id][0].number] == world.oracle[first.request_id]
    assert halves > 0, "no moment was between two blocks of the item"


def test_a_preempted_sequence_finds_its_media_in_preparation_still_and_its_end_abandons_them() -> None:
    """A long clip that is half decoded is not begun anew because its request made room for another."""
    for comes_back in (True, False):
        world = make_world(items=(4,))
        request = world.make_request(["ab", 0, "c"], max_tokens=2)
        (sequence,) = world.add(request) or []
        while sequence.phase is not Phase.MEDIA:
            world.step()
        world.scheduler.preempt(sequence)
        assert world.scheduler.take_abandoned_media() == []
        if comes_back:
            world.step()
            assert world.pending_media == [world.items[0][1].key], "asked for once"
            settle(world)
        else:
            world.cancel(request.request_id)
            assert world.scheduler.take_abandoned_media() == [world.items[0][1].key]
        assert sequence.phase is Phase.FINISHED
        assert world.scheduler.desk.num_pending == 0
