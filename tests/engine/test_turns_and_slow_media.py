"""What one turn of the owner may hold, and that nobody waits for media that are not theirs, or leaves room in vain."""

from __future__ import annotations

import pytest
from simulation import World
from test_invariants_of_pages import ask, make_world, settle

from prism_server.engine import admission
from prism_server.engine.sequence import Phase, Sequence


def add(world: World, parts: list[int | str], n: int = 1) -> list[Sequence]:
    added = world.add(world.make_request(parts, max_tokens=2, n=n, ignore_eos=True))
    assert added is not None
    return added


def run_without_media(world: World) -> None:
    """Everything that can be done while no medium arrives."""
    while world.step():
        pass


def test_samples_of_a_long_cached_prompt_are_admitted_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ENTERED_PAGES", 20)
    world = make_world(num_pages=64, page_tokens=4, max_running=16)
    ask(world, ["abcde" * 10, "a"])  # 12 full pages
    samples = add(world, ["abcde" * 10, "b"], n=16)
    running = []
    while any(sample.phase is not Phase.FINISHED for sample in samples):
        world.step()
        running.append(len(world.scheduler.running))
        assert all(len(plan.pages) < 20 + 13 for plan in world.launched), "one more prompt's pages at most"
    assert max(running) > 2, "those that are admitted run beside each other"
    settle(world)


def test_who_shares_text_with_a_request_does_not_wait_for_its_media() -> None:
    """The picture may be a long clip: its decoding takes seconds."""
    world = make_world(items=(4, 4), page_tokens=4)
    (leader,) = add(world, ["abcdeabcde", 0, "a"])
    run_without_media(world)
    (follower,) = add(world, ["abcdeabcde", "ba"])
    run_without_media(world)
    assert leader.phase is Phase.MEDIA
    assert follower.phase is Phase.FINISHED
    settle(world)
    assert leader.prefilled_tokens == leader.prompt_tokens, "and nothing is computed twice"
    assert follower.prefilled_tokens < follower.prompt_tokens


@pytest.mark.parametrize("chunk_tokens", [3, 12, 0])
def test_who_goes_on_before_its_media_are_there_holds_no_encoder_output(chunk_tokens: int) -> None:
    """One of its two pictures is there. The cache has room for one: nobody else could encode until the other came."""
    world = make_world(items=(4, 4, 4), page_tokens=4, feature_tokens=4, chunk_tokens=chunk_tokens)
    (leader,) = add(world, ["abcdeabcde", 0, "a", 1, "a"])
    run_without_media(world)
    world.media_arrives(world.pending_media.index(world.items[0][1].key))
    (follower,) = add(world, ["abcdeabcde", "ba"])
    (other,) = add(world, [2, "e"])
    run_without_media(world)
    world.media_arrives(world.pending_media.index(world.items[2][1].key))
    run_without_media(world)
    assert leader.phase is Phase.MEDIA
    assert 0 < leader.num_planned <= leader.spans[0].start
    assert not leader.pins
    assert [follower.phase, other.phase] == [Phase.FINISHED, Phase.FINISHED]
    settle(world)
    assert world.executor.encodes == {facts.key: 1 for _, facts in world.items}


@pytest.mark.parametrize("followers", [0, 3])
def test_a_request_computes_nothing_before_its_media_are_there_unless_that_helps_somebody(followers: int) -> None:
    """A step for a few rows is no gain where all wait for the last medium: they go with the first chunk."""
    world = make_world(items=(4, 4), page_tokens=4)
    (leader,) = add(world, ["abcdeabcde", 0, "cd", 1, "a"])
    for number in range(followers):
        add(world, ["abcdeabcde", 0, "cd", 1, "edcb"[: number + 2]])
    run_without_media(world)
    world.media_arrives(0)
    run_without_media(world)
    assert len(world.scheduler.parked) == followers
    assert (leader.phase, leader.num_planned) == (Phase.MEDIA, 0)
    settle(world)


def test_no_room_in_a_step_is_kept_for_requests_for_which_there_are_no_pages() -> None:
    world = make_world(num_pages=11, page_tokens=4, max_step_tokens=8, max_running=8, depth=0)
    (long,) = add(world, ["abcde" * 8])
    world.step()
    (short,) = add(world, ["edcbaedc"])  # two pages, and one is left
    chunks = []
    while long.phase is Phase.PREFILL:
        before = long.num_planned
        world.step()
        chunks.append(long.num_planned - before)
        assert short.phase is Phase.WAITING
    assert chunks == [4, 8, 8, 8, 4], "the first one leaves half to who has just come"
    settle(world)
