"""INVARIANTS, section A: pages and prefix. Each test is named by its sentence; the simulated executor checks bytes."""

from __future__ import annotations

import random

import pytest
from simulation import Sizes, World

from prism_server.engine.sequence import Phase, Sequence
from prism_server.identity import Digest
from prism_server.kv.cached_page import Match


def make_world(seed: int = 1, items: tuple[int, ...] = (4, 4, 3), **sizes: int | bool) -> World:
    world = World(Sizes(**{"num_pages": 32, "feature_tokens": 64, "max_step_tokens": 64, **sizes}), random.Random(seed))
    world.items = [world.make_item(f"item {number}", tokens) for number, tokens in enumerate(items)]
    return world


def ask(world: World, parts: list[int | str], max_tokens: int = 4) -> Sequence:
    """One request, run to its end, alone."""
    added = world.add(world.make_request(parts, max_tokens, ignore_eos=True))
    assert added is not None
    settle(world)
    return added[0]


def settle(world: World, limit: int = 5000) -> None:
    for _ in range(limit):
        if not (world.scheduler.has_work or world.launched):
            return
        while world.pending_media:
            world.media_arrives(0)
        world.step()
    raise AssertionError("the engine stands still with work left")


def match_of(world: World, parts: list[int | str]) -> Match:
    prompt = world.make_request(parts).prompt
    return world.kv.index.match(prompt.page_keys, [(b.rows, b.key) for b in prompt.boundaries], len(prompt) - 1)


def findable(world: World, keys: list[Digest]) -> list[bool]:
    return [key in world.kv.index for key in keys]


@pytest.mark.parametrize("depth", [0, 1])  # the world knows by the bytes whether a row that is counted is computed
@pytest.mark.parametrize("page_tokens", [3, 4])
@pytest.mark.parametrize("chunk_tokens", [1, 2, 3])
def test_nothing_is_published_at_allocation_and_after_k_tokens_exactly_k_over_page_pages_are_findable(
    chunk_tokens: int, page_tokens: int, depth: int
) -> None:
    world = make_world(chunk_tokens=chunk_tokens, page_tokens=page_tokens, depth=depth)
    request = world.make_request(["abc", 0, "de", 1, "abcde"], max_tokens=2, ignore_eos=True)
    (sequence,) = world.add(request) or []
    page_keys, boundaries = list(request.prompt.page_keys), request.prompt.boundaries
    partial, closed = set[int](), set[int]()
    while sequence.phase is not Phase.FINISHED:
        while world.pending_media:
            world.media_arrives(0)
        world.step()
        k = sequence.num_computed
        if sequence.phase is Phase.PREFILL and sequence.table:
            assert findable(world, page_keys) == [number * page_tokens <= k for number in range(1, len(page_keys) + 1)]
            assert findable(world, [b.key for b in boundaries]) == [b.rows <= k for b in boundaries]
            partial |= {k} & set(range(1, sequence.prompt_tokens))
            closed |= {k} & {b.rows for b in boundaries}
    assert partial
    assert closed or chunk_tokens > 1, "some chunk ends where a medium closes"


def test_a_page_filled_by_decoding_is_published_only_after_its_last_row_is_written() -> None:
    world = make_world(page_tokens=4, depth=1)
    (sequence,) = world.add(world.make_request(["abcab"], max_tokens=12, ignore_eos=True)) or []
    while sequence.phase is not Phase.FINISHED:
        world.step()
        full = sequence.num_computed // 4
        assert all(findable(world, sequence.keys[:full]))
        assert len(sequence.keys) == full or sequence.num_computed < 5
    assert len(sequence.keys) == (5 + 12 - 1) // 4


def test_cancelling_half_way_leaves_only_computed_pages() -> None:
    world = make_world(chunk_tokens=4, page_tokens=2, depth=1)
    request = world.make_request(["abcabcdde", "eedcbabcde"])
    (sequence,) = world.add(request) or []
    for _ in range(3):
        world.step()
    computed, planned = sequence.num_computed, sequence.num_planned
    assert 0 < computed < planned
    world.cancel(request.request_id)
    settle(world)
    keys = list(request.prompt.page_keys)
    assert findable(world, keys) == [number * 2 <= computed for number in range(1, len(keys) + 1)]


def test_a_copied_page_has_no_key_until_it_is_full_and_computed_under_its_own_tokens() -> None:
    world = make_world(page_tokens=8)
    ask(world, ["abc", 0, "aaa"])
    request = world.make_request(["abc", 0, "bbbbbbbbbbbb"], max_tokens=1)
    (second,) = world.add(request) or []
    while world.pending_media:
        world.media_arrives(0)
    world.step()
    copied = second.table[1]
    assert copied not in {node.page for node in world.kv.index.nodes()}
    settle(world)
    assert copied in {node.page for node in world.kv.index.nodes()}, "full and computed: it has a key of its own"


def test_the_source_page_never_changes_whatever_is_asked_later() -> None:
    world = make_world(page_tokens=8)  # the world compares the bytes under every key after every step
    ask(world, ["abc", 0, "aaa"])
    for question in ("b", "bb", "bbbbbbbbbbbbbbbbbb", "aaab", "a"):
        ask(world, ["abc", 0, question])
    world.check()


def test_a_second_question_shorter_than_the_first_neither_fails_nor_hits_wrongly() -> None:
    world = make_world(page_tokens=4)
    ask(world, ["abc", 0, "aaaaaaaaaaaaaaa"])
    for question in ("a", "aaaaa", "b", "aaaaaaaaaaaaaaa"):
        ask(world, ["abc", 0, question])


def test_a_second_question_after_the_same_media_computes_no_media_row_wherever_the_media_end_in_a_page() -> None:
    for offset in range(1, 9):
        for page_tokens in (2, 3, 4, 7):
            world = make_world(page_tokens=page_tokens)
            ask(world, ["a" * offset, 0, 1, "abc"])
            second = ask(world, ["a" * offset, 0, 1, "cba"])
            assert second.prefilled_media_tokens == 0
            assert second.encoded_items == second.decoded_items == 0
            assert second.prefilled_tokens == 3, "only the question itself is computed"


def test_reclaimable_pages_are_the_unique_physical_pages_all_of_whose_references_come_from_evictable_entries() -> None:
    world, rng = make_world(num_pages=8, page_tokens=3), random.Random(5)
    for _ in range(60):
        if rng.random() < 0.3:
            world.add(world.make_request(["abc", rng.randrange(3), "ab" * rng.randint(1, 3)], rng.randint(1, 6)))
        while world.pending_media:
            world.media_arrives(0)
        world.step()
        in_tables = {page for sequence in world.scheduler.running for page in sequence.table}
        evictable = {node.page for node in world.kv.index.nodes() if node.locks == 0} - {None}
        locked = {node.page for node in world.kv.index.nodes() if node.locks} - {None}
        assert world.kv.index.num_evictable == len(evictable)
        assert not evictable & (in_tables | locked)


def test_free_plus_used_is_the_total_and_references_are_live_tables_plus_entries() -> None:
    world, rng = make_world(num_pages=6, page_tokens=2), random.Random(6)
    for _ in range(80):
        if rng.random() < 0.3:
            world.add(world.make_request(["ab" * rng.randint(1, 4)], rng.randint(1, 6), n=rng.randint(1, 2)))
        world.step()  # `check` counts them after every step
    settle(world)
    world.check_idle()


def test_within_a_plan_every_place_is_a_destination_once_and_no_destination_is_a_source() -> None:
    swaps = 0
    for seed in range(30):  # the executor runs each class of copies in random order and compares every byte
        world = make_world(seed, num_pages=9, page_tokens=2, host_slots=24)
        rng = random.Random(seed)
        for _ in range(40):
            if rng.random() < 0.4:
                world.add(world.make_request([rng.choice("abcde") * 5, rng.randrange(3), "ab"], rng.randint(1, 4)))
            while world.pending_media:
                world.media_arrives(0)
            world.step()
        settle(world)
        swaps += world.scheduler.counters["swapped_in_pages"]
    assert swaps > 50, "the worlds hardly swap: they show nothing"


def test_a_page_that_a_plan_brings_back_from_the_host_is_no_copys_source_before_that_plan_has_completed() -> None:
    world = make_world(num_pages=6, page_tokens=3, host_slots=12)
    ask(world, ["abcabc"], max_tokens=1)
    for text in ("ddddddddd", "eeeeeeeee", "cccccc"):
        ask(world, [text], max_tokens=1)
    both = match_of(world, ["abcabcd"]).nodes
    assert [node.page for node in both] == [None, None], "only the host has them"
    (longer,) = world.add(world.make_request(["abcabcd"], max_tokens=1)) or []
    (whole,) = world.add(world.make_request(["abcabc"], max_tokens=1)) or []
    world.step()  # its plan is checked: the page that comes back is not copied from
    assert longer.table[:2] == [node.page for node in both]
    assert whole.table[:1] == longer.table[:1]
    settle(world)


def test_a_prompt_that_is_wholly_cached_still_computes_exactly_one_token_in_a_private_page() -> None:
    for page_tokens in (2, 3, 4):
        for text in ("abcabc", "abcabcdde", "abcabcdeabcd"):
            world = make_world(page_tokens=page_tokens)
            ask(world, [text], max_tokens=8)
            request = world.make_request([text], max_tokens=1)
            (again,) = world.add(request) or []
            world.step()
            cached_pages = {node.page for node in world.kv.index.nodes()}
            whole = len(text) % page_tokens == 0
            if whole:
                assert again.prefilled_tokens == 1
                assert again.table[-1] not in cached_pages
            settle(world)
        for offset in range(1, page_tokens + 1):  # a prompt that ends with a medium is cached to its last row
            world = make_world(page_tokens=page_tokens)
            ask(world, ["a" * offset, 0])
            (again,) = world.add(world.make_request(["a" * offset, 0], max_tokens=1)) or []
            world.step()
            assert again.prefilled_tokens == 1
            assert again.table[-1] not in {node.page for node in world.kv.index.nodes()}
            settle(world)


def test_two_items_with_equal_placeholder_tokens_never_share_kv() -> None:
    world = make_world(items=(4, 4), page_tokens=2)
    ask(world, ["ab", 0, "abc"])
    other = ask(world, ["ab", 1, "abc"])
    assert other.first_cached_media_tokens == 0
    assert ask(world, ["ab", 0, "cc"]).first_cached_media_tokens == 4


def test_the_same_item_at_another_offset_or_after_another_left_context_never_shares_kv() -> None:
    world = make_world(page_tokens=2)
    ask(world, ["ab", 0, "abc"])
    assert ask(world, ["abab", 0, "abc"]).first_cached_media_tokens == 0, "another offset"
    assert ask(world, ["ba", 0, "abc"]).first_cached_tokens == 0, "another left context"
    assert ask(world, ["ab", 1, 0, "abc"]).first_cached_media_tokens == 0, "another medium before it"


def test_a_hit_that_ends_inside_an_item_resumes_at_that_row_with_the_features_sliced_there() -> None:
    world = make_world(items=(5,), page_tokens=4, chunk_tokens=4)
    request = world.make_request(["ab", 0, "abc"])
    (first,) = world.add(request) or []
    while world.pending_media or first.num_computed < 4:
        while world.pending_media:
            world.media_arrives(0)
        world.step()
    assert 3 < first.num_computed < 8, "the first page ends inside the item"
    world.cancel(request.request_id)
    again = ask(world, ["ab", 0, "abc"])
    assert again.first_cached_tokens == 4
    assert again.first_cached_media_tokens == 1
    assert again.prefilled_media_tokens == 4
    assert again.encoded_items == 0, "the features are still there"
    world.cancel(request.request_id)
    world.features.clear()
    world.kv.index.clear()
    assert ask(world, ["ab", 0, "abc"]).encoded_items == 1


def test_a_cached_page_whose_request_has_ended_stays_findable_until_it_is_reused_for_something_else() -> None:
    world = make_world(num_pages=8, page_tokens=2)
    first = ask(world, ["abcabc"], max_tokens=1)
    assert all(findable(world, first.keys))
    ask(world, ["de"], max_tokens=1)
    assert all(findable(world, first.keys)), "there were free pages"
    ask(world, ["eeeeeeeeeeeeee"], max_tokens=2)
    assert not all(findable(world, first.keys)), "the pool is full: they were reused"
    assert match_of(world, ["abcabc"]).rows(2) < 5


def test_what_a_launched_plan_names_is_not_reused_before_that_plan_has_completed() -> None:
    world, rng = make_world(num_pages=4, page_tokens=2, depth=1), random.Random(3)
    preemptions = 0
    for _ in range(300):  # the executor refuses a write to a page that an earlier, uncompleted plan names
        if len(world.live_requests()) < 4:
            world.add(world.make_request(["".join(rng.choices("abcde", k=3))], 4, ignore_eos=True))
        if rng.random() < 0.1:
            world.cancel(rng.choice(world.live_requests()))
        world.step()
        preemptions = world.scheduler.counters["preemptions"]
    assert preemptions > 5
    settle(world)


def test_a_surplus_token_is_never_emitted_counted_or_published() -> None:
    world = make_world(page_tokens=2, depth=1)
    for text in ("a", "b", "c", "d", "e", "ab", "bc", "cd", "de", "ea"):
        (sequence,) = world.add(world.make_request([text], max_tokens=30)) or []
        settle(world)
        assert world.emitted[sequence.number] == world.oracle[sequence.request.request_id]
        assert world.scheduler.counters["generated_tokens"] == sum(map(len, world.emitted.values()))
        assert len(sequence.keys) <= (sequence.prompt_tokens + len(sequence.outputs) - 1) // 2


def test_thirty_two_simultaneous_requests_over_eight_new_media_groups_compute_eight_prefixes() -> None:
    world = make_world(items=(4,) * 8, num_pages=200, page_tokens=4, max_running=32)
    for number in range(32):
        world.add(world.make_request(["ab", number % 8, "abcde"[number // 8]], max_tokens=2))
    settle(world)
    assert world.scheduler.counters["encoded_items"] == 8
    assert world.scheduler.counters["prefilled_media_tokens"] == 8 * 4
    assert world.scheduler.counters["decoded_items"] == 8


def test_a_leaders_cancellation_loses_none_of_those_that_wait() -> None:
    world = make_world(page_tokens=4, chunk_tokens=2, max_running=4)
    requests = [world.make_request(["abcde", 0, 1, "ab" * (n + 1)], max_tokens=2) for n in range(4)]
    leader, *others = [(world.add(request) or [])[0] for request in requests]
    while leader.phase is not Phase.PREFILL:
        while world.pending_media:
            world.media_arrives(0)
        world.step()
    assert all(other.phase is Phase.PARKED for other in others)
    world.cancel(requests[0].request_id)
    settle(world)
    assert sorted(end.reason == "cancelled" for end in world.ended) == [False, False, False, True]
