"""The prefix index by itself: matching, forgetting, the host tier, what it reports."""

from __future__ import annotations

from prism_server.kv.cache import KVCache
from prism_server.kv.cached_page import CachedPage

PAGE = 4


def make_cache(num_pages: int = 8, host_slots: int = 0) -> KVCache:
    return KVCache(num_pages, PAGE, host_slots)


def publish_chain(kv: KVCache, keys: list[bytes]) -> list[CachedPage]:
    """A finished request's full pages under `keys`, one after the other; nobody stands on them."""
    nodes: list[CachedPage] = []
    for key in keys:
        page = kv.pool.allocate()
        node = kv.index.publish(nodes[-1] if nodes else None, key, page, PAGE)
        assert node is not None
        kv.index.move_lock(nodes[-1] if nodes else None, node)
        kv.pool.release(page, 0)
        nodes.append(node)
    kv.index.unlock_path(nodes[-1], 0)
    return nodes


def test_a_match_ends_at_the_first_page_that_is_not_there() -> None:
    kv = make_cache()
    publish_chain(kv, [b"a", b"b", b"c"])
    assert kv.index.match([b"a", b"b", b"x", b"c"], [], 100).rows(PAGE) == 8


def test_a_boundary_lengthens_a_match_inside_the_next_page_only() -> None:
    kv = make_cache()
    (first,) = publish_chain(kv, [b"a"])
    page = kv.pool.allocate()
    kv.index.publish(first, b"edge", page, 3)
    kv.pool.release(page, 0)
    found = kv.index.match([b"a"], [(7, b"edge")], 100)
    assert (found.rows(PAGE), found.tail_rows) == (7, 3)
    assert kv.index.match([b"a"], [(7, b"edge")], 6).rows(PAGE) == 6, "never beyond the limit"
    assert kv.index.match([b"x"], [(7, b"edge")], 100).rows(PAGE) == 0, "the page before it is another"


def test_pages_are_forgotten_coldest_first_and_leaves_before_their_parents() -> None:
    kv = make_cache(num_pages=5)
    publish_chain(kv, [b"a", b"b", b"c"])
    publish_chain(kv, [b"x", b"y"])
    kv.index.lock_path(kv.index.match([b"a", b"b", b"c"], [], 100).nodes[-1])
    kv.index.unlock_path(kv.index.match([b"a", b"b", b"c"], [], 100).nodes[-1], 0)
    gone = []
    for _ in range(5):
        assert kv.index.reclaim(1) == 1
        gone.append({key for key in (b"a", b"b", b"c", b"x", b"y") if key not in kv.index} - set().union(*gone, set()))
        kv.check_integrity()
    assert gone == [{b"y"}, {b"x"}, {b"c"}, {b"b"}, {b"a"}]


def test_a_held_page_is_never_reclaimed() -> None:
    kv = make_cache(num_pages=2)
    nodes = publish_chain(kv, [b"a", b"b"])
    kv.index.lock_path(nodes[-1])
    assert kv.index.num_evictable == 0
    assert kv.index.reclaim(2) == 0


def test_a_page_counts_who_stands_on_it_and_its_locked_children_not_everyone_below() -> None:
    kv = make_cache()
    nodes = publish_chain(kv, [b"a", b"b", b"c"])
    for _ in range(16):  # the samples of one request: only the first one walks up to the root
        kv.index.lock_path(nodes[2])
    kv.index.lock_path(nodes[1])
    assert [node.locks for node in nodes] == [1, 2, 16]
    for step in range(16):
        assert kv.index.num_evictable == 0
        kv.index.unlock_path(nodes[2], named_by_step=16 - step)
    assert kv.index.num_evictable == 1
    kv.index.unlock_path(nodes[1], named_by_step=3)
    kv.check_integrity()
    assert kv.index.num_evictable == 3
    kv.complete(15)
    assert kv.index.reclaim(3) == 0, "step 16 may read all three"
    kv.complete(16)
    assert kv.index.reclaim(3) == 3


def test_a_cold_page_lives_on_in_the_host_tier_and_comes_back() -> None:
    kv = make_cache(num_pages=4, host_slots=4)
    publish_chain(kv, [b"a", b"b", b"c", b"d"])
    copies = kv.back_up_cold(step=1)
    assert len(copies) == 4
    assert kv.index.reclaim(4) == 0, "step 1 still reads the pages"
    kv.complete(1)
    assert kv.index.reclaim(4) == 4
    found = kv.index.match([b"a", b"b", b"c", b"d"], [], 100)
    assert found.rows(PAGE) == 16
    assert all(node.page is None for node in found.nodes)
    kv.check_integrity()


def test_a_full_host_tier_forgets_its_coldest() -> None:
    kv = make_cache(num_pages=4, host_slots=2)
    publish_chain(kv, [b"a", b"b", b"c", b"d"])
    kv.back_up_cold(step=1)
    kv.complete(1)
    kv.index.reclaim(4)
    assert kv.index.match([b"a", b"b"], [], 100).rows(PAGE) == 0, "a page whose parent went cannot be reached"
    kv.check_integrity()
    assert kv.pool.num_free == 4


def test_media_chain_keys_are_reported_when_published_and_when_lost() -> None:
    kv = make_cache(num_pages=2)
    (first,) = publish_chain(kv, [b"a"])
    page = kv.pool.allocate()
    kv.index.publish(first, b"edge", page, 2, b"media 1")
    kv.index.note_media_key(b"edge", b"media 1 spelt otherwise")
    kv.pool.release(page, 0)
    assert kv.index.take_events() == ((b"media 1", b"media 1 spelt otherwise"), ())
    kv.index.reclaim(2)
    added, evicted = kv.index.take_events()
    assert (added, set(evicted)) == ((), {b"media 1", b"media 1 spelt otherwise"})


def test_an_index_that_is_off_finds_and_keeps_nothing() -> None:
    kv = KVCache(2, PAGE, prefix_cache=False)
    page = kv.pool.allocate()
    assert kv.index.publish(None, b"a", page, PAGE) is None
    assert kv.index.match([b"a"], [], 10).rows(PAGE) == 0
    kv.pool.release(page, 0)
    assert kv.pool.num_free == 2
