"""Light load on a Service, one long answer, readers of pages: who must not notice that pods come and go."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import httpx

from e2e.harness import Object, eventually
from e2e.prism import Page, chat, stream

PAUSE_S = 0.3
TIMEOUT_S = 60.0
PAGE_TOKENS = 80
"""Of the language model, for a page of 256 x 320 pixels."""
SHORT_ANSWER = chat("What is this?", max_tokens=4)


@dataclass
class Tally:
    """What the clients saw. No client ever tries again."""

    answered: int = 0
    sent_away: int = 0
    """With a 503 that says when to come back: there is nobody to serve them."""
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
                is_sent_away = answer.status_code == 503 and answer.headers.get("retry-after", "").isdigit()
            except httpx.HTTPError as error:
                problem, is_sent_away = repr(error), False
            if is_sent_away:
                tally.sent_away += 1
            elif problem:
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


@dataclass(frozen=True)
class Reading:
    """One streamed answer about a page, read to its end."""

    page: int
    pod: str
    cached_tokens: int
    problem: str = ""


def read_page(url: str, number: int, page: Page) -> Reading:
    """On a connection of its own, so that the Service picks a router each time."""
    body = chat(page.question, page.png, max_tokens=8, stream=True, stream_options={"include_usage": True})
    pod, cached_tokens, ended = "", 0, "cut off"
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=TIMEOUT_S) as response:
            pod = response.headers.get("x-prism-pod", "")
            if response.status_code != 200:
                return Reading(number, pod, 0, f"{response.status_code} {response.read().decode()[:300]}")
            for line in response.iter_lines():
                if not line.startswith("data: "):
                    continue
                if line == "data: [DONE]":
                    ended = ""
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return Reading(number, pod, 0, str(event["error"]))
                if usage := event.get("usage"):
                    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    except httpx.HTTPError as error:
        ended = repr(error)
    return Reading(number, pod, cached_tokens, ended)


def homes(url: str, pages: Sequence[Page]) -> dict[int, str]:
    """Asks about each page twice, of whichever routers: the second time it is known, where it was the first time.

    Returns the pod of each.
    """
    found = {}
    for number, page in enumerate(pages):
        first, second = (read_page(url, number, page) for _ in range(2))
        assert (first.problem, second.problem) == ("", "")
        assert second.pod == first.pod
        assert second.cached_tokens >= PAGE_TOKENS
        found[number] = first.pod
    return found


@contextmanager
def readers(url: str, pages: Sequence[Page], count: int = 2) -> Iterator[list[Reading]]:
    """So many people who ask about the pages in turns while the block runs; what they read, and what went wrong."""
    found: list[Reading] = []
    end = threading.Event()

    def read_on(first: int) -> None:
        number = first
        while not end.wait(PAUSE_S):
            found.append(read_page(url, number % len(pages), pages[number % len(pages)]))
            number += 1

    threads = [threading.Thread(target=read_on, args=(first,), daemon=True) for first in range(count)]
    for thread in threads:
        thread.start()
    try:
        eventually("the first readings", lambda: len(found) >= len(pages))
        yield found
    finally:
        end.set()
        for thread in threads:
            thread.join(TIMEOUT_S + 5)
