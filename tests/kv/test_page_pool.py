"""The page pool against a model that is only a dictionary of counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prism_server.kv.pool import PagePool

moves = st.lists(
    st.tuples(st.sampled_from(["allocate", "retain", "release", "complete"]), st.integers(0, 50)), max_size=60
)


@given(num_pages=st.integers(0, 6), moves=moves)
def test_any_order_of_moves_agrees_with_plain_counting(num_pages: int, moves: list[tuple[str, int]]) -> None:
    pool, counts, named = PagePool(num_pages), dict.fromkeys(range(num_pages), 0), dict.fromkeys(range(num_pages), 0)
    retired: dict[int, int] = {}
    completed = 0
    for move, number in moves:
        held = [page for page, count in counts.items() if count]
        if move == "allocate" and pool.num_free:
            page = pool.allocate()
            assert counts[page] == 0
            assert page not in retired
            counts[page], named[page] = 1, 0
        elif move == "retain" and held:
            page = held[number % len(held)]
            pool.retain(page)
            counts[page] += 1
        elif move == "release" and held:
            page, step = held[number % len(held)], completed + number % 3
            pool.release(page, step)
            counts[page] -= 1
            named[page] = max(named[page], step)
            if not counts[page] and named[page] > completed:
                retired[page] = named[page]
        elif move == "complete":
            completed += 1
            pool.complete(completed)
            retired = {page: step for page, step in retired.items() if step > completed}
        assert [pool.references(page) for page in counts] == list(counts.values())
        assert pool.num_retired == len(retired)
        assert pool.num_free == sum(count == 0 for count in counts.values()) - len(retired)
        pool.check_integrity()


def test_a_page_released_more_often_than_taken_is_loud() -> None:
    pool = PagePool(1)
    page = pool.allocate()
    pool.release(page, 0)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(page, 0)
    with pytest.raises(AssertionError, match="nobody holds"):
        pool.retain(page)


def test_a_page_waits_for_the_last_step_that_names_it_whoever_lets_it_go_last() -> None:
    pool = PagePool(1)
    page = pool.allocate()
    pool.retain(page)
    pool.release(page, named_by_step=7)
    pool.release(page, named_by_step=3)
    assert (pool.num_free, pool.num_retired) == (0, 1)
    pool.complete(3)
    assert pool.num_free == 0
    pool.complete(7)
    assert pool.num_free == 1
