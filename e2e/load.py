"""Constant light load on a Service, and one long answer: what must not notice that pods come and go."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import httpx

from e2e.harness import Object, eventually
from e2e.prism import chat, stream

PAUSE_S = 0.3
TIMEOUT_S = 60.0
SHORT_ANSWER = chat("What is this?", max_tokens=4)


@dataclass
class Tally:
    """What the clients saw. No client ever tries again."""

    answered: int = 0
    failures: list[str] = field(default_factory=list)

    def more(self, count: int = 5) -> None:
        """Returns after so many further answers: whoever asks at the end has waited for the latest state."""
        goal = self.answered + count
        eventually("more answers", lambda: self.answered >= goal or self.failures)


@contextmanager
def steady_load(url: str) -> Iterator[Tally]:
    """Two clients that open a connection for each request, and two that keep theirs until they are told to close it."""
    tally, end = Tally(), threading.Event()
    clients = [
        threading.Thread(target=_client, args=(url, tally, end, keeps_connection), daemon=True)
        for keeps_connection in (False, True, False, True)
    ]
    for client in clients:
        client.start()
    try:
        tally.more(len(clients))
        yield tally
    finally:
        end.set()
        for client in clients:
            client.join(TIMEOUT_S + 5)


def _client(url: str, tally: Tally, end: threading.Event, keeps_connection: bool) -> None:
    with ExitStack() as kept:
        connection = kept.enter_context(httpx.Client(timeout=TIMEOUT_S)) if keeps_connection else None
        while not end.wait(PAUSE_S):
            began_s = time.monotonic()
            try:
                post = connection.post if connection else httpx.post
                answer = post(f"{url}/v1/chat/completions", json=SHORT_ANSWER, timeout=TIMEOUT_S)
                problem = "" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:300]}"
            except httpx.HTTPError as error:
                problem = repr(error)
            if problem:
                kind = "kept" if keeps_connection else "new"
                tally.failures.append(f"{kind} connection, after {time.monotonic() - began_s:.2f} s: {problem}")
            else:
                tally.answered += 1


class LongAnswer(threading.Thread):
    """Reads one streamed answer of at most `num_tokens`, and leaves after `longest_s`, however slow the engine is."""

    def __init__(self, url: str, num_tokens: int, longest_s: float) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body: Object = chat("Go on.", max_tokens=num_tokens, ignore_eos=True)
        self._longest_s = longest_s
        self.num_chunks = 0
        self.ended = ""
        """`left` when it was still flowing; else its `finish_reason`, or what broke it."""
        self.seconds = 0.0
        """From the request to the last chunk."""

    def run(self) -> None:
        began_s = time.monotonic()
        try:
            for event in stream(self._url, self._body, timeout_s=TIMEOUT_S):
                self.seconds = time.monotonic() - began_s
                self._take(event)
                if not self.ended and self.seconds > self._longest_s:
                    self.ended = "left"
                if self.ended:
                    return
            self.ended = "cut off"
        except httpx.HTTPError as error:
            self.ended = repr(error)

    def _take(self, event: Object) -> None:
        self.num_chunks += 1
        finished = [choice.get("finish_reason") for choice in event.get("choices", [])]
        self.ended = str(event["error"]) if "error" in event else next(filter(None, finished), "")
