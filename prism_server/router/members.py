"""The pods that discovery has found: where each is, whether it may be used, and the task that follows its cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace

from prism_server.router.breaker import Breaker
from prism_server.router.endpoints import Endpoint
from prism_server.router.fleet import Fleet
from prism_server.router.settings import UpstreamSettings
from prism_server.router.upstream import Pool

DISTRUST_AGE_S = 5.0
"""A source of pods that has been silent for longer is not asked who is ready; the pods are."""


@dataclass
class Member:
    """One pod, as it is followed."""

    endpoint: Endpoint
    breaker: Breaker
    last_sign_s: float
    """When it last answered a poll, whatever it said."""
    has_answered: bool = False
    """Whether it ever has."""
    is_silent: bool = False
    """Whether its last polls were not answered at all."""
    is_answering: bool = False
    """Whether it answers polls, and says that it serves."""
    problem: str = "not polled yet"
    """Why not, for people."""
    following: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def owes_signs(self) -> bool:
        """Whether a silence would mean something: it has answered polls, and is still polled."""
        return self.has_answered and self.following is not None


Follow = Callable[[Member], Coroutine[None, None, None]]


class Members:
    """By UID. Keeps the fleet's pods up to date."""

    def __init__(self, fleet: Fleet, pool: Pool, settings: UpstreamSettings, follow: Follow) -> None:
        self._fleet, self._pool, self._settings, self._follow = fleet, pool, settings, follow
        self._by_uid: dict[str, Member] = {}
        self._told: tuple[Endpoint, ...] | None = None
        self._trusts_source = True

    def __getitem__(self, uid: str) -> Member:
        return self._by_uid[uid]

    def all(self) -> Sequence[Member]:
        return tuple(self._by_uid.values())

    @property
    def are_met(self) -> bool:
        """Whether every pod that should serve has answered a poll."""
        return all(member.has_answered or member.endpoint.is_ready is False for member in self._by_uid.values())

    def take(self, endpoints: Sequence[Endpoint]) -> None:
        """All pods that there are now."""
        now_s = asyncio.get_running_loop().time()
        before, self._by_uid = self._by_uid, {}
        for endpoint in endpoints:
            member = before.pop(endpoint.uid, None) or self._new(endpoint, now_s)
            member.endpoint = endpoint
            self._by_uid[endpoint.uid] = member
        for gone in before.values():
            self._forget(gone)
        self.refresh()

    def refresh(self, source_age_s: float | None = 0.0) -> None:
        """Tells the fleet who is ready, if that has changed."""
        self._trusts_source = source_age_s is not None and source_age_s <= DISTRUST_AGE_S
        members = self._by_uid.values()
        ready = {member.endpoint.uid for member in members if self._is_ready(member)}
        silent = {member.endpoint.uid for member in members if _has_gone_silent(member)}
        if ready - silent:  # if all are silent, the fault is more likely to be here
            ready -= silent
        pods = tuple(replace(member.endpoint, is_ready=member.endpoint.uid in ready) for member in members)
        if pods != self._told:
            self._told = pods
            self._fleet.set_pods(pods, asyncio.get_running_loop().time())

    def answered(self, member: Member, is_serving: bool, problem: str = "") -> None:
        """A poll was answered."""
        member.last_sign_s, member.has_answered = asyncio.get_running_loop().time(), True
        self._judge(member, is_serving, False, problem)

    def silent(self, member: Member, problem: str) -> None:
        """Polls are not answered."""
        self._judge(member, False, True, problem)

    def blocked(self, now_s: float) -> set[str]:
        """UIDs whose breaker is open."""
        return {uid for uid, member in self._by_uid.items() if not member.breaker.allows(now_s)}

    def close(self) -> None:
        for member in self.all():
            self._forget(member)
        self._by_uid = {}

    def _judge(self, member: Member, is_serving: bool, is_silent: bool, problem: str) -> None:
        before = member.is_answering, member.is_silent
        member.is_answering, member.is_silent, member.problem = is_serving, is_silent, problem
        if before != (is_serving, is_silent):
            self.refresh(0.0 if self._trusts_source else None)

    def _new(self, endpoint: Endpoint, now_s: float) -> Member:
        breaker = Breaker(self._settings.breaker_failures, self._settings.breaker_open_s)
        member = Member(endpoint, breaker, now_s)
        member.following = asyncio.create_task(self._follow(member))
        return member

    def _forget(self, member: Member) -> None:
        if member.following is not None:
            member.following.cancel()
            member.following = None
        self._pool.forget(member.endpoint.api)
        self._pool.forget(member.endpoint.admin)

    def _is_ready(self, member: Member) -> bool:
        """As the source says, where it knows; else as the pod says itself."""
        said = member.endpoint.is_ready if self._trusts_source else None
        return member.is_answering if said is None else said


def _has_gone_silent(member: Member) -> bool:
    """A pod that has answered polls and does so no more is dead before its probes have noticed. One that never has may
    be kept from it by a policy, and still serve."""
    return member.has_answered and member.is_silent
