"""What the router's requests share. Event loop only, but for the threads that compute keys."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from prism_server.http.byte_budget import ByteBudget
from prism_server.http.key_file import KeyFile
from prism_server.router.asgi import Body
from prism_server.router.budget import RetryBudget
from prism_server.router.decision import Decision, NoPod
from prism_server.router.endpoints import Discovery, Endpoint
from prism_server.router.fleet import Fleet, FleetRules
from prism_server.router.follower import Follower
from prism_server.router.lifecycle import Lifecycle
from prism_server.router.media_size import MediaSizer
from prism_server.router.members import Members
from prism_server.router.metrics import Metrics
from prism_server.router.placement import PlacementRules, decide
from prism_server.router.request_keys import RequestKeys, read_request
from prism_server.router.settings import RouterSettings
from prism_server.router.upstream import Pool

KEY_THREADS = 2
"""Their work is mostly hashing, which needs no interpreter lock."""
INLINE_BYTES = 1 << 16
"""Bodies up to this size are read on the event loop: 0.1 ms, and a thread would add half of that. Measured."""
TICK_S = 1.0
MEETING_CHECK_S = 0.05


class Open(Protocol):
    """A request under way, as the ticker sees it."""

    def tick(self, now_s: float) -> None:
        """A second has passed."""
        ...

    def stop(self) -> None:
        """The router ends."""
        ...


class Services:
    """Built once."""

    def __init__(self, settings: RouterSettings, discovery: Discovery) -> None:
        """Raises StartupError where the file of the token cannot be read."""
        self.settings = settings
        self.discovery = discovery
        self.lifecycle = Lifecycle()
        self.metrics = Metrics()
        self.fleet = Fleet(FleetRules(slow_start_s=settings.placement.slow_start_s))
        self.rules = PlacementRules(load_bound=settings.placement.load_bound)
        self.sizer = MediaSizer()
        self.pool = Pool(settings.upstream.connect_timeout_s)
        self.buffers = ByteBudget("the router", settings.http.max_buffered_bytes)
        self.retries = RetryBudget(settings.upstream.retry_share, settings.upstream.retry_burst)
        self.open: set[Open] = set()
        token_file = settings.http.admin_token_file
        self.admin_token = KeyFile(token_file, "http.admin_token_file") if token_file else None
        follower = Follower(self.fleet, self.pool, settings.cache, self.admin_token)
        self.members = Members(
            self.fleet, self.pool, settings.upstream, lambda member: follower.follow(self.members, member)
        )
        self._workers = ThreadPoolExecutor(KEY_THREADS, thread_name_prefix="prism-keys")

    async def keys_of(self, path: str, body: Body) -> RequestKeys:
        """The request's keys; large bodies are read in a thread, beside the streams."""
        schemes = self.fleet.schemes

        def read() -> RequestKeys:
            return read_request(path, body.data, schemes, self.sizer, self.fleet.content_of)

        if len(body.data) <= INLINE_BYTES:
            return read()
        return await asyncio.get_running_loop().run_in_executor(self._workers, read)

    def place(self, keys: RequestKeys, tried: Set[str]) -> Decision | NoPod:
        """Where the request goes now, if not to `tried`."""
        now_s = asyncio.get_running_loop().time()
        return decide(self.fleet, keys, now_s, tried | self.members.blocked(now_s), self.rules)

    async def discover(self) -> None:
        """Follows the source of pods until it is cancelled."""
        found = asyncio.Event()

        def take(endpoints: Sequence[Endpoint]) -> None:
            self.members.take(endpoints)
            found.set()

        meeting = asyncio.create_task(self._become_ready(found))
        try:
            await self.discovery.run(take)
        finally:
            meeting.cancel()

    async def _become_ready(self, found: asyncio.Event) -> None:
        """After the first discovery, however many pods there are. Those that serve are given some seconds to say what
        they hold, so that the first requests go where their pictures are."""
        await found.wait()
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self.settings.discovery.meeting_s
        while not self.members.are_met and loop.time() < end_s:
            await asyncio.sleep(MEETING_CHECK_S)
        self.lifecycle.ready()

    async def tick(self) -> None:
        """Time-outs and comments of all open requests, by one task instead of a timer for each piece."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            now_s = loop.time()
            self.members.refresh(self.discovery.age_s(now_s))
            for request in tuple(self.open):
                request.tick(now_s)

    def close(self) -> None:
        self.members.close()
        self.pool.close()
        self._workers.shutdown(wait=False, cancel_futures=True)
