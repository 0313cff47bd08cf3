"""What the handlers share: there from the first second, with the engine joining once it is loaded. Event loop only."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prism_server.errors import EngineFault
from prism_server.http.byte_budget import ByteBudget
from prism_server.http.key_file import KeyFile
from prism_server.media.fetch import LinkFetcher
from prism_server.serving.body import budget_for
from prism_server.serving.cache_journal import CacheJournal
from prism_server.serving.dispatch import Dispatcher
from prism_server.serving.http_errors import NotReady
from prism_server.serving.lifecycle import Lifecycle
from prism_server.serving.metrics import Metrics
from prism_server.serving.prepare import Preparer
from prism_server.settings import ServerSettings

if TYPE_CHECKING:
    from prism_server.engine.engine import Engine  # imports torch, long after the ports must answer

PREPARATION_THREADS = 4
"""JSON, base64, headers, templates and tokens: most of their work holds Python's lock, so more would gain little."""


@dataclass(frozen=True, slots=True)
class Running:
    """What there is once the model is loaded."""

    engine: Engine
    dispatcher: Dispatcher
    preparer: Preparer


@dataclass
class Services:
    """Built before the model is loaded."""

    settings: ServerSettings
    lifecycle: Lifecycle
    bodies: ByteBudget
    api_keys: KeyFile | None
    admin_token: KeyFile | None
    fetcher: LinkFetcher
    metrics: Metrics
    journal: CacheJournal = field(default_factory=CacheJournal)
    workers: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(PREPARATION_THREADS, thread_name_prefix="prism-prepare")
    )
    started_unix_s: int = field(default_factory=lambda: int(time.time()))
    _running: Running | None = None

    @classmethod
    def from_settings(cls, settings: ServerSettings) -> Services:
        """Raises StartupError where a file of keys or certificates cannot be read."""
        http, engine, metrics = settings.http, settings.engine, Metrics()
        fetcher = LinkFetcher(settings.fetch, metrics.link_fetched)
        metrics.watch_links(fetcher)
        max_inside = engine.max_running_sequences + engine.max_waiting_requests
        return cls(
            settings,
            Lifecycle(max_inside),
            budget_for(http.max_body_bytes, max_inside),
            KeyFile(http.api_keys_file, "http.api_keys_file") if http.api_keys_file else None,
            KeyFile(http.admin_token_file, "http.admin_token_file") if http.admin_token_file else None,
            fetcher,
            metrics,
        )

    def attach(self, engine: Engine) -> None:
        """The model is loaded: from now on requests are answered."""
        dispatcher = Dispatcher(engine, self.journal, self.metrics)
        self._running = Running(engine, dispatcher, Preparer(engine, self.settings))
        self.metrics.watch_engine(engine)
        engine.start(dispatcher.on_events)
        self.lifecycle.ready()

    def running(self) -> Running:
        """Raises NotReady while the model is being loaded."""
        if self._running is None:
            raise NotReady(self.lifecycle.reason, self.lifecycle.phase)
        return self._running

    @property
    def fault(self) -> EngineFault | None:
        """What the engine died of; None while it lives, and before there is one."""
        return None if self._running is None else self._running.engine.fault

    def close(self) -> bool:
        """False: the engine is stuck, so that the process has to be ended; see `Engine.stop`."""
        self.workers.shutdown(wait=False, cancel_futures=True)
        self.fetcher.close()
        return self._running is None or self._running.engine.stop()
