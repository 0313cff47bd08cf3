"""Who may take the Lease, and how the operator's health is told."""

from __future__ import annotations

from prism_operator.health import Health
from prism_operator.lease import Seen, may_take
from prism_operator.queue import Key


def lease(holder: str, renewed: str) -> dict[str, object]:
    return {"spec": {"holderIdentity": holder, "renewTime": renewed, "leaseDurationSeconds": 15}}


def test_a_free_lease_and_ones_own_may_be_taken() -> None:
    assert may_take({"spec": {}}, Seen(), "me", 0.0)
    assert may_take(lease("", "t"), Seen(("", "t"), 0.0), "me", 0.0)
    assert may_take(lease("me", "t"), Seen(("me", "t"), 0.0), "me", 0.0)


def test_anothers_lease_may_be_taken_only_when_it_has_stood_still_for_its_duration() -> None:
    seen = Seen().updated(lease("you", "t1"), 100.0)
    assert not may_take(lease("you", "t1"), seen, "me", 114.9)
    assert may_take(lease("you", "t1"), seen, "me", 115.0)
    renewed = seen.updated(lease("you", "t2"), 114.0)
    assert not may_take(lease("you", "t2"), renewed, "me", 128.0)


def test_liveness_is_the_age_of_the_last_resync() -> None:
    now = [0.0]
    health = Health(300.0, lambda: now[0])
    now[0] = 299.0
    assert health.problem() == ""
    health.resynced({})
    now[0] = 599.0
    assert health.problem() == ""
    now[0] = 600.0
    assert "no resync for 301 s" in health.problem()


def test_a_watch_that_never_tells_of_an_object_is_dead() -> None:
    key, health = Key("ns", "a"), Health(300.0)
    health.watched(key, "1")
    for version in ("2", "2", "2"):
        assert health.problem() == ""
        health.resynced({key: version})
    assert "the watch is dead" in health.problem()
    health.watched(key, "2")
    health.resynced({key: "2"})
    assert health.problem() == ""


def test_an_object_that_changes_all_the_time_does_not_prove_a_dead_watch() -> None:
    key, health = Key("ns", "a"), Health(300.0)
    for version in range(10):
        health.watched(key, str(version))
        health.resynced({key: str(version + 1)})
    assert health.problem() == ""
