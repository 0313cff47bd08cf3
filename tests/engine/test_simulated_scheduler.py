"""Millions of random steps through the real scheduler, allocator and prefix index, with a simulated executor."""

from __future__ import annotations

import os
import random

import pytest
from simulation import Sizes, World

from prism_server.engine import admission

NUM_STEPS = int(os.environ.get("PRISM_SIMULATED_STEPS", "100000"))
SEED = int(os.environ.get("PRISM_SIMULATED_SEED", "0")) or (
    20_261_130 if "CI" in os.environ else random.SystemRandom().getrandbits(32)
)
"""The same worlds every time where `CI` is set (see conftest.py), others in every run elsewhere."""
STEPS_PER_WORLD = 200
SHARED_TEXTS = ["a", "abcab", "abcabcdde", "eedcbabcde"]


def random_parts(rng: random.Random, num_items: int) -> list[int | str]:
    """Text and items in any order; few of each, so that prefixes meet."""
    parts: list[int | str] = [rng.choice(SHARED_TEXTS)]
    for _ in range(rng.choice([0, 1, 1, 2, 3])):
        parts.append(rng.randrange(num_items))
        if rng.random() < 0.3:
            parts.append(rng.choice(SHARED_TEXTS[:2]))
    parts.append("".join(rng.choice("abcde") for _ in range(rng.randint(1, 6))))
    return parts


def random_move(world: World, rng: random.Random) -> None:
    choice = rng.random()
    if choice < 0.12 and len(world.live_requests()) < 12:
        request = world.make_request(
            random_parts(rng, len(world.items)),
            rng.randint(1, 8),
            n=rng.choice([1, 1, 1, 2, 3]),
            ignore_eos=rng.random() < 0.2,
        )
        world.add(request)
    elif choice < 0.15 and world.live_requests():
        world.cancel(rng.choice(world.live_requests()))
    elif choice < 0.35 and world.pending_media:
        world.media_arrives(rng.randrange(len(world.pending_media)), fails=rng.random() < 0.1)
    elif choice < 0.36:
        world.executor.failing ^= {rng.choice(world.items)[1].key}
    elif choice < 0.365:
        world.scheduler.forget_idle_caches()
    else:
        world.step()


def run_world(seed: int, num_steps: int, sizes: Sizes | None = None) -> int:
    """One world, of random sizes where none are given, through about `num_steps` steps and to its end. Returns the
    steps it took."""
    rng = random.Random(seed)
    world = World(sizes or Sizes.draw(rng), rng)
    while world.num_steps < num_steps and world.num_moves < 4 * num_steps:
        random_move(world, rng)
        world.num_moves += 1
    world.executor.failing.clear()
    world.drain()
    return world.num_steps


@pytest.mark.parametrize("seed", [1410429227, 3873183705, 1000386, 5023501, 5025172])
def test_worlds_that_once_broke_a_rule_keep_them_all(seed: int) -> None:
    run_world(seed, STEPS_PER_WORLD)


ODD_SIZES = {
    "one page": Sizes(num_pages=1, page_tokens=16, host_slots=1),
    "pages of one row": Sizes(num_pages=30, page_tokens=1, host_slots=3),
    "pages longer than any prompt": Sizes(num_pages=3, page_tokens=64),
    "rows one by one": Sizes(page_tokens=1, num_pages=20, chunk_tokens=1, max_running=1, max_step_tokens=1, depth=0),
    "one host slot": Sizes(num_pages=8, host_slots=1, max_running=16),
    "room for the largest item alone": Sizes(num_pages=12, feature_tokens=5, max_running=16, chunk_tokens=1),
    "all at once": Sizes(num_pages=40, max_running=20, max_step_tokens=200),
}


@pytest.mark.parametrize("sizes", ODD_SIZES.values(), ids=ODD_SIZES)
def test_odd_sizes_keep_the_invariants(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "MAX_ENTERED_PAGES", 2)
    for seed in range(10):
        run_world(seed, 60, sizes)


@pytest.mark.timeout(900)
def test_any_order_of_events_keeps_the_invariants(capsys: pytest.CaptureFixture[str]) -> None:
    steps, seed = 0, SEED
    with capsys.disabled():
        print(f"\nsimulated scheduler: seed {SEED}, at least {NUM_STEPS} steps")
    while steps < NUM_STEPS:
        try:
            steps += run_world(seed, STEPS_PER_WORLD)
        except Exception as error:
            raise AssertionError(f"world {seed}: run again with PRISM_SIMULATED_SEED={seed}") from error
        seed += 1
