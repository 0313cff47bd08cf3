"""The journal of cache changes: a reader that follows it knows what is held, however it reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prism_server.engine.messages import CacheChanged
from prism_server.identity import LinkContent
from prism_server.serving.cache_journal import CacheJournal, CacheNews

A, B, C = (bytes([i]) * 32 for i in range(3))


class Follower:
    """What a router remembers of one server."""

    def __init__(self) -> None:
        self.epoch: str | None = None
        self.cursor: int | None = None
        self.chains: set[bytes] = set()
        self.features: set[bytes] = set()

    def poll(self, journal: CacheJournal) -> CacheNews:
        news = journal.since(self.epoch, self.cursor)
        if news.snapshot:
            self.chains, self.features = set(), set()
        self.chains = (self.chains - set(news.chains_evicted)) | set(news.chains_added)
        self.features = (self.features - set(news.features_evicted)) | set(news.features_added)
        self.epoch, self.cursor = news.epoch, news.cursor
        return news


def test_the_first_poll_is_a_snapshot_and_later_ones_are_changes() -> None:
    journal, follower = CacheJournal(), Follower()
    journal.record(CacheChanged(chains_added=(A, B), features_added=(C,)))
    assert follower.poll(journal).snapshot
    assert (follower.chains, follower.features) == ({A, B}, {C})
    journal.record(CacheChanged(chains_evicted=(A,)))
    news = follower.poll(journal)
    assert (news.snapshot, news.chains_added, news.chains_evicted) == (False, (), (A,))
    assert not follower.poll(journal).chains_evicted


def test_the_last_word_on_a_key_counts() -> None:
    journal, follower = CacheJournal(), Follower()
    follower.poll(journal)
    journal.record(CacheChanged(chains_added=(A,)))
    journal.record(CacheChanged(chains_evicted=(A,)))
    journal.record(CacheChanged(chains_added=(B,)))
    journal.record(CacheChanged(chains_evicted=(B,), chains_added=(B,)))
    news = follower.poll(journal)
    assert (news.chains_added, news.chains_evicted) == ((B,), (A,))


def test_another_epoch_an_unknown_cursor_or_a_gap_gives_a_snapshot() -> None:
    journal = CacheJournal(max_keys=4)
    journal.record(CacheChanged(chains_added=(A,)))
    here = journal.since(None, None)
    assert journal.since("another", here.cursor).snapshot
    assert journal.since(journal.epoch, None).snapshot
    assert journal.since(journal.epoch, here.cursor + 1).snapshot
    assert not journal.since(journal.epoch, here.cursor).snapshot
    for _ in range(10):
        journal.record(CacheChanged(chains_added=(B,)))
    assert journal.since(journal.epoch, here.cursor).snapshot


def test_a_reset_forgets_everything_under_a_new_epoch() -> None:
    journal, follower = CacheJournal(), Follower()
    journal.record(CacheChanged(chains_added=(A,), features_added=(B,)))
    follower.poll(journal)
    before = journal.epoch
    journal.reset()
    assert journal.epoch != before
    assert follower.poll(journal).snapshot
    assert (follower.chains, follower.features) == (set(), set())


KEYS = st.lists(st.sampled_from([A, B, C]), max_size=2, unique=True).map(tuple)
CHANGES = st.builds(CacheChanged, KEYS, KEYS, KEYS, KEYS)


@given(st.lists(st.one_of(CHANGES, st.just("poll"), st.just("reset")), max_size=40), st.integers(1, 20))
def test_a_follower_of_any_history_holds_what_the_server_holds(
    history: list[CacheChanged | str], max_keys: int
) -> None:
    journal, follower = CacheJournal(max_keys), Follower()
    chains: set[bytes] = set()
    features: set[bytes] = set()
    for step in [*history, "poll"]:
        if isinstance(step, CacheChanged):
            journal.record(step)
            chains = (chains - set(step.chains_evicted)) | set(step.chains_added)
            features = (features - set(step.features_evicted)) | set(step.features_added)
        elif step == "reset":
            journal.reset()
            chains, features = set(), set()
        else:
            follower.poll(journal)
    assert (follower.chains, follower.features) == (chains, features)


def test_links_are_told_once_and_again_when_they_lead_elsewhere() -> None:
    journal, follower = CacheJournal(max_links=2), Follower()
    journal.record_link(A, B)
    assert follower.poll(journal).links == (LinkContent(A, B),)
    journal.record_link(A, B)
    assert follower.poll(journal).links == ()
    journal.record_link(B, C)
    journal.record_link(A, C)
    news = follower.poll(journal)
    assert (news.snapshot, news.links) == (False, (LinkContent(B, C), LinkContent(A, C)))
    journal.record_link(C, A)
    assert journal.since(None, None).links == (LinkContent(A, C), LinkContent(C, A))
    journal.reset()
    assert follower.poll(journal).links == (LinkContent(A, C), LinkContent(C, A))
