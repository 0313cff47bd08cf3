"""Who may be used, when the source of pods, the pods themselves, or nobody can say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import httpx
from router_http_support import CHAT, chat_body
from scripted_pods import Asked, answer_json, scripted

from prism_server.http.listener import Listener
from prism_server.http.sockets import bind, url_of
from prism_server.router.app import api_app
from prism_server.router.discovery_static import parse_backends
from prism_server.router.endpoints import Endpoint, OnEndpoints
from prism_server.router.fleet import Fleet
from prism_server.router.members import DISTRUST_AGE_S, Member, Members
from prism_server.router.services import Services
from prism_server.router.settings import RouterSettings, UpstreamSettings
from prism_server.router.upstream import Origin, Pool


def endpoint(name: str, is_ready: bool | None = True) -> Endpoint:
    return Endpoint(name, f"uid-of-{name}", is_ready, api=Origin(name, 8000), admin=Origin(name, 9000))


async def _follow_nobody(member: Member) -> None:
    await asyncio.get_running_loop().create_future()


def with_members(scene: Callable[[Members, Callable[[], set[str]]], None]) -> None:
    """Runs `scene` with members, and a function that says which pods may be given requests."""

    async def run() -> None:
        fleet = Fleet()
        members = Members(fleet, Pool(1.0), UpstreamSettings(), _follow_nobody)
        scene(members, lambda: {pod.name for pod in fleet.view.pods})
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


class Told:
    """A source that names one pod, until the test says that it is gone."""

    def __init__(self, pod: Endpoint) -> None:
        self.gone = asyncio.Event()
        self._pod = pod

    async def run(self, on_endpoints: OnEndpoints) -> None:
        on_endpoints([self._pod])
        await self.gone.wait()
        on_endpoints([])
        await asyncio.get_running_loop().create_future()

    def age_s(self, now_s: float) -> float | None:
        return 0.0


def test_requests_at_a_pod_that_discovery_has_dropped_run_on_without_its_polls() -> None:
    """Nobody polls it any more, so its polls' silence says nothing."""

    async def answers_late(asked: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(4)
        await answer_json(writer, {"said": "late"})

    async def run(backend: str, was_asked: Callable[[], bool]) -> None:
        settings = RouterSettings.model_validate(
            {"discovery": {"backends": backend}, "upstream": {"silence_timeout_s": 1}, "cache": {"poll_ms": 50}}
        )
        told = Told(parse_backends(backend, 0)[0])
        services = Services(settings, told)
        bound = bind("127.0.0.1", 0, "http.port")
        listener = Listener(bound, api_app(services), 1.0)
        url = url_of(bound) + CHAT
        listener.start()
        background = [asyncio.create_task(task) for task in (services.discover(), services.tick())]
        async with asyncio.timeout(60), httpx.AsyncClient(timeout=60) as client:
            while not services.members.all() or not services.members.all()[0].is_answering:
                await asyncio.sleep(0.02)
            asking = asyncio.create_task(client.post(url, json=chat_body("Hello")))
            while not was_asked():
                await asyncio.sleep(0.02)
            told.gone.set()
            answer = await asking
            assert (answer.status_code, answer.json()) == (200, {"said": "late"})
            assert (await client.post(url, json=chat_body("Hello"))).status_code == 503
        for task in background:
            task.cancel()
        await asyncio.gather(listener.close(), *background, return_exceptions=True)
        services.close()

    with scripted(answers_late) as (pod,):
        asyncio.run(run(pod.backend, lambda: bool(pod.asked)))
