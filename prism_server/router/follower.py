"""Follows what one pod's cache holds: polls its admin listener, and so also knows whether it lives."""

from __future__ import annotations

import asyncio
import logging
import random

from prism_server.http.key_file import KeyFile
from prism_server.router.cache_answer import AnswerError, parse_cache
from prism_server.router.fleet import Fleet
from prism_server.router.members import Member, Members
from prism_server.router.settings import CacheSettings
from prism_server.router.upstream import Origin, Pool, UpstreamError, request_head

MAX_ANSWER_BYTES = 1 << 26
LARGE_ANSWER_BYTES = 1 << 18
"""Snapshots beyond it are read in a thread."""
FAILURES_TO_DISTRUST = 2
NOT_YET = 503

log = logging.getLogger(__name__)


class Follower:
    """Its `follow` is a task per pod."""

    def __init__(self, fleet: Fleet, pool: Pool, settings: CacheSettings, admin_token: KeyFile | None) -> None:
        self._fleet, self._pool, self._settings, self._admin_token = fleet, pool, settings, admin_token

    async def follow(self, members: Members, member: Member) -> None:
        """Polls until it is cancelled. What goes wrong is said once, and shows as the age of what is known."""
        said, failures = "", 0
        while True:
            try:
                problem = await self._poll(members, member)
                failures = 0
            except (UpstreamError, TimeoutError) as error:
                problem = str(error) or "no answer to a poll in time"
                failures += 1
                if failures >= FAILURES_TO_DISTRUST:
                    members.silent(member, problem)
            if problem != said:
                said = problem
                log.warning("pod %s: %s", member.endpoint.name, problem or "is followed again")
            await asyncio.sleep(self._settings.poll_ms / 1e3 * random.uniform(0.9, 1.1))

    async def _poll(self, members: Members, member: Member) -> str:
        """What is wrong with the answer, if anything. Raises UpstreamError, TimeoutError."""
        loop = asyncio.get_running_loop()
        uid, asked_s = member.endpoint.uid, loop.time()
        at = self._fleet.position(uid)
        target = "/internal/cache" + (f"?epoch={at.epoch}&cursor={at.cursor}" if at else "")
        status, body = await self._get(member.endpoint.admin, target)
        if status == 200:
            try:
                answer = (
                    parse_cache(body)
                    if len(body) < LARGE_ANSWER_BYTES
                    else await loop.run_in_executor(None, parse_cache, body)
                )
            except AnswerError as error:
                return await self._ask_only_for_health(members, member, str(error))
            self._fleet.apply(uid, answer, asked_s, loop.time())
            members.answered(member, is_serving=True)
            return ""
        if status == NOT_YET:
            members.answered(member, is_serving=False, problem="does not serve yet, or any more")
            return ""
        return await self._ask_only_for_health(members, member, f"/internal/cache answers HTTP {status}")

    async def _ask_only_for_health(self, members: Members, member: Member, problem: str) -> str:
        """A pod that does not tell what it holds can still be used: by its place and its load."""
        status, _ = await self._get(member.endpoint.api, "/readyz")
        members.answered(member, status == 200, problem)
        return problem

    async def _get(self, origin: Origin, target: str) -> tuple[int, bytes]:
        headers = [(b"accept", b"application/json")]
        if self._admin_token is not None and target.startswith("/internal/"):
            headers.append((b"authorization", f"Bearer {self._admin_token.first()}".encode()))
        async with asyncio.timeout(self._settings.poll_timeout_s), self._pool.connection(origin) as connection:
            connection.send(request_head("GET", target.encode(), origin, headers, None))
            head = await connection.head()
            assert head is not None  # nobody nudges a poll
            return head.status, await connection.rest(MAX_ANSWER_BYTES)
