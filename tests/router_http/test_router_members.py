"""Who may be used, when the source of pods, the pods themselves, or nobody can say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from prism_server.router.endpoints import Endpoint
from prism_server.router.fleet import Fleet
from prism_server.router.members import DISTRUST_AGE_S, Member, Members
from prism_server.router.settings import UpstreamSettings
from prism_server.router.upstream import Origin, Pool


def endpoint(name: str, is_ready: bool | None = True) -> Endpoint:
    return Endpoint(name, f"uid-of-{name}", Origin(name, 8000), Origin(name, 9000), is_ready)


async def _follow_nobody(member: Member) -> None:
    await asyncio.get_running_loop().create_future()


def with_members(scene: Callable[[Members, Callable[[], set[str]]], None]) -> None:
    """Runs `scene` with members, and a function that says which pods may be given requests."""

    async def run() -> None:
        fleet = Fleet()
        members = Members(fleet, Pool(1.0), UpstreamSettings(), _follow_nobody)
        scene(members, lambda: {pod.pod.home for pod in fleet.view.pods})
        members.close()

    asyncio.run(run())


def test_the_source_says_who_is_ready_while_it_is_followed_and_the_pods_when_it_is_not() -> None:
    def scene(members: Members, usable: Callable[[], set[str]]) -> None:
        members.take([endpoint("a"), endpoint("b"), endpoint("c", is_ready=False)])
        assert usable() == {"a", "b"}
        members.refresh(DISTRUST_AGE_S + 1)
        assert usable() == set()
        members.answered(members["uid-of-a"], is_serving=True)
        members.answered(members["uid-of-c"], is_serving=True)
        assert usable() == {"a", "c"}
        members.refresh(0.0)
        assert usable() == {"a", "b"}

    with_members(scene)


def test_pods_of_a_list_say_themselves_whether_they_serve() -> None:
    def scene(members: Members, usable: Callable[[], set[str]]) -> None:
        members.take([endpoint("a", None), endpoint("b", None)])
        assert usable() == set()
        assert not members.are_met
        members.answered(members["uid-of-a"], is_serving=True)
        members.answered(members["uid-of-b"], is_serving=False)
        assert usable() == {"a"}
        assert members.are_met

    with_members(scene)


def test_a_pod_that_goes_silent_is_not_used_unless_all_are_silent() -> None:
    def scene(members: Members, usable: Callable[[], set[str]]) -> None:
        members.take([endpoint("a"), endpoint("b"), endpoint("c")])
        members.silent(members["uid-of-c"], "kept away by a policy")
        assert usable() == {"a", "b", "c"}
        for name in ("a", "b", "c"):
            members.answered(members[f"uid-of-{name}"], is_serving=True)
        members.silent(members["uid-of-a"], "no answer")
        assert usable() == {"b", "c"}
        members.silent(members["uid-of-b"], "no answer")
        members.silent(members["uid-of-c"], "no answer")
        assert usable() == {"a", "b", "c"}

    with_members(scene)


def test_a_terminating_pod_gets_nothing_new_and_a_gone_one_is_forgotten() -> None:
    def scene(members: Members, usable: Callable[[], set[str]]) -> None:
        members.take([endpoint("a"), endpoint("b")])
        followed = members["uid-of-b"].following
        members.take([endpoint("a"), replace(endpoint("b"), is_terminating=True)])
        assert usable() == {"a"}
        members.take([endpoint("a")])
        assert [member.endpoint.name for member in members.all()] == ["a"]
        assert followed is not None
        assert followed.cancelling()

    with_members(scene)
