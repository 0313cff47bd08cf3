"""The engine as serving sees it: built from settings, fed with requests, answering in events."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from prism_server.engine.answers import Answers
from prism_server.engine.build import Parts, build_parts
from prism_server.engine.messages import EngineInfo, EngineStats, Event, GenerateRequest
from prism_server.engine.owner import Cancel, ForgetCaches, Owner, Stop, Submit
from prism_server.engine.progress import Progress
from prism_server.engine.scheduler import Scheduler
from prism_server.errors import EngineFault, Overloaded
from prism_server.media.pipeline import MediaPipeline
from prism_server.prompt.encoder import PromptEncoder
from prism_server.settings import ServerSettings

__all__ = ["Engine", "EngineInfo", "Progress"]

STOP_TIMEOUT_S = 7.0
"""For the step under way, when the engine is stopped. Last words to clients (5 s) and the listeners' end (2 s) come
before it: with both, a process whose engine hangs still says so within the 15 s that its pod has beyond the drain."""


class Engine:
    """Thread-safe front of the owner thread."""

    def __init__(self, parts: Parts, settings: ServerSettings) -> None:
        limits = settings.engine
        self.info: EngineInfo = parts.info
        self.media: MediaPipeline = parts.media
        self.prompts: PromptEncoder = parts.prompts
        self._parts = parts
        self._most_sequences = limits.max_running_sequences + limits.max_waiting_requests
        self._live_sequences = 0
        self._lock = threading.Lock()
        self._random = random.SystemRandom()
        self._scheduler: Scheduler = parts.scheduler
        answers = Answers(parts.prompts.tokenizer, parts.scheduler, self._ended)
        depth = 1 if limits.overlap else 0
        self._owner = Owner(parts.scheduler, parts.executor, parts.media, answers, depth)

    @classmethod
    def build(cls, settings: ServerSettings, progress: Callable[[Progress], None] | None = None) -> Engine:
        """Load the model and everything around it; blocks. Raises StartupError, in one line, when that cannot be."""
        return cls(build_parts(settings, progress or (lambda _: None)), settings)

    def start(self, on_events: Callable[[Sequence[Event]], None]) -> None:
        """Start the owner; `on_events` is called on its thread, once a step, with all events of the step."""
        self._owner.start(on_events)

    def submit(self, request: GenerateRequest) -> None:
        """Hand in a request; any thread. Raises Overloaded: the queue is full; EngineFault: the engine is dead."""
        if self._owner.fault is not None:
            raise EngineFault(self._owner.fault.reason)
        with self._lock:
            if self._live_sequences + request.params.n > self._most_sequences:
                raise Overloaded(f"{self._live_sequences} sequences run or wait, the most this server takes")
            self._live_sequences += request.params.n
        seed = request.params.seed
        self._owner.send(Submit(request, self._random.getrandbits(62) if seed is None else seed))

    def cancel(self, request_id: str) -> None:
        """End a request in whatever phase it is; idempotent, any thread."""
        self._owner.send(Cancel(request_id))

    def reset_cache(self) -> None:
        """Forget every cached prefix and feature that no request uses."""
        self._owner.send(ForgetCaches())

    def stats(self) -> EngineStats:
        """A snapshot that is never older than one step."""
        stats, memo = self._owner.stats, self.prompts.tokenizer.memo
        texts = {"text_memo_hits": memo.hits, "text_memo_misses": memo.misses, "text_memo_evictions": memo.evictions}
        return replace(stats, counters={**stats.counters, **texts})

    @property
    def fault(self) -> EngineFault | None:
        """Why the engine is dead; None while it lives."""
        return self._owner.fault

    @property
    def turn_began_s(self) -> float | None:
        """When the engine's thread began its present turn, by the monotonic clock; None while it has nothing to do.

        A turn waits for one step at most: one that does not end is a device, or a thread, that stands still.
        """
        return self._owner.turn_began_s

    def stop(self) -> bool:
        """End the owner (live requests fail), then the device and the media workers.

        False: the owner is stuck in its turn. Nothing is released then, and its thread, like the device's, will not
        end: only the process can.
        """
        self._owner.send(Stop())
        if not self._owner.join(STOP_TIMEOUT_S):
            return False
        self._parts.executor.close()
        self.media.close()
        return True

    def _ended(self, request: GenerateRequest) -> None:
        with self._lock:
            self._live_sequences -= request.params.n
