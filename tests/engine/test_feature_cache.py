"""Encoder outputs within a capacity in bytes."""

from __future__ import annotations

import random

from prism_server.engine.feature_cache import FeatureCache
from prism_server.identity import content_id
from prism_server.media.item import ItemKey


def key(name: str) -> ItemKey:
    return ItemKey(content_id("image", name.encode()), b"layout")


def add(cache: FeatureCache, name: str, num_bytes: int, sequence: int) -> bool:
    if not cache.try_reserve(key(name), num_bytes, sequence):
        return False
    cache.advance(key(name), 3, finished=True)
    return True


def test_a_cache_of_one_item_holds_one_and_gives_way_when_nobody_needs_it() -> None:
    cache = FeatureCache(10)
    assert add(cache, "a", 10, sequence=1)
    assert not add(cache, "b", 1, sequence=2), "pinned"
    cache.unpin(key("a"), 1)
    assert cache.holds(key("a")), "idle items stay while there is room"
    assert add(cache, "b", 1, sequence=2)
    assert not cache.holds(key("a"))
    assert cache.take_changes() == ((key("a"), key("b")), (key("a"),))


def test_the_least_recently_used_goes_first() -> None:
    cache = FeatureCache(3)
    for name in "abc":
        add(cache, name, 1, 1)
        cache.unpin(key(name), 1)
    cache.pin(key("a"), 2)
    cache.unpin(key("a"), 2)
    add(cache, "d", 2, 3)
    assert [cache.holds(key(name)) for name in "abcd"] == [True, False, False, True]


def test_what_does_not_fit_beside_the_pinned_evicts_nothing() -> None:
    cache = FeatureCache(4)
    add(cache, "a", 2, 1)
    add(cache, "b", 2, 2)
    cache.unpin(key("b"), 2)
    assert not cache.try_reserve(key("c"), 3, 3)
    assert cache.holds(key("b"))


def test_a_half_encoded_item_that_nobody_waits_for_is_dropped() -> None:
    cache = FeatureCache(4)
    cache.try_reserve(key("a"), 2, 1)
    cache.advance(key("a"), 1, finished=False)
    cache.unpin(key("a"), 1)
    cache.drop_if_idle(key("a"))
    assert cache.blocks_done(key("a")) is None
    assert cache.used_bytes == 0


def test_random_use_never_exceeds_the_capacity_and_keeps_what_is_pinned() -> None:
    rng, cache, pins = random.Random(1), FeatureCache(20), dict[int, str]()
    for number in range(3000):
        name = f"item {rng.randrange(12)}"
        if cache.holds(key(name)):
            cache.pin(key(name), number)
            pins[number] = name
        elif add(cache, name, 1 + int(name[5:]) % 7, number):
            pins[number] = name
        while pins and rng.random() < 0.5:
            sequence = rng.choice(list(pins))
            cache.unpin(key(pins.pop(sequence)), sequence)
        cache.check_integrity()
        assert all(cache.holds(key(name)) for name in pins.values())
