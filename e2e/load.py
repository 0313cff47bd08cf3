"""Light load on a Service, one long answer, readers of pages: who must not notice that pods come and go."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import httpx

from e2e.harness import Object, eventually
from e2e.prism import Page, chat, events_of

PAUSE_S = 0.3
TIMEOUT_S = 60.0
KNOWN_S = 3.0
"""Until every router has asked every engine what it holds: twelve of its polls."""
AT_HOME: Object = {"overrides": {"placement": {"load_bound": 1000}}}
"""Of `router`: pages are where they were, and new ones at their homes, however busy those are."""
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
    """Reads one streamed answer about a page, of at most `num_tokens`, until it is told to leave."""

    def __init__(self, url: str, page: Page, num_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._body: Object = chat("Go on.", page.png, max_tokens=num_tokens, ignore_eos=True)
        self._leaves_s = float("inf")
        self.pod = ""
        """That answers, once its head is there."""
        self.num_chunks = 0
        self.ended = ""
        """`left` when it was still flowing; else its `finish_reason`, or what broke it."""

    def has_begun(self) -> bool:
        """Whether it flows, or has ended already."""
        return self.num_chunks > 5 or bool(self.ended)

    def leave_in(self, seconds: float) -> None:
        """However slow the engine is."""
        self._leaves_s = time.monotonic() + seconds

    def run(self) -> None:
        try:
            for event in events_of(self._url, self._body, self._head):
                self._take(event)
                if not self.ended and time.monotonic() > self._leaves_s:
                    self.ended = "left"
                if self.ended:
                    return
            self.ended = "cut off"
        except httpx.HTTPError as error:
            self.ended = repr(error)

    def _head(self, headers: httpx.Headers) -> None:
        self.pod = headers.get("x-prism-pod", "")

    def _take(self, event: Object) -> None:
        self.num_chunks += 1
        finished = [choice.get("finish_reason") for choice in event.get("choices", [])]
        self.ended = str(event["error"]) if "error" in event else next(filter(None, finished), "")


def long_answer_of(pod: str, url: str, pages: Iterable[Page], num_tokens: int) -> LongAnswer:
    """One that flows from that pod: every page has a home of its own."""
    for page in pages:
        answer = LongAnswer(url, page, num_tokens)
        answer.start()
        eventually("a stream that flows", answer.has_begun)
        if answer.pod == pod or answer.ended:
            return answer
        answer.leave_in(0)
    raise AssertionError(f"{pod} is the home of no page")


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

    Nobody else may ask: pages are copied when their pod is busy. Returns the pod of each.
    """
    first = [read_page(url, number, page) for number, page in enumerate(pages)]
    second = known_readings(url, pages)
    assert [reading.problem for reading in first if reading.problem] == []
    assert [reading.pod for reading in second] == [reading.pod for reading in first]
    return {reading.page: reading.pod for reading in first}


def known_readings(url: str, pages: Sequence[Page]) -> list[Reading]:
    """Asks about each page, which some pod holds, once every router knows that."""
    time.sleep(KNOWN_S)
    readings = [read_page(url, number, page) for number, page in enumerate(pages)]
    assert [reading for reading in readings if reading.problem or reading.cached_tokens < PAGE_TOKENS] == []
    return readings


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
