"""The router's small parts, each by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from prism_server.cli_support import ArgumentParser
from prism_server.errors import StartupError
from prism_server.http.error_body import retry_after
from prism_server.router.budget import RetryBudget
from prism_server.router.events import LONGEST_EVENT_BYTES, WholeEvents, error_events_from
from prism_server.router.proxied_headers import answer_headers, request_headers
from prism_server.router.settings import ROUTER, RouterSettings
from prism_server.router.upstream import Head


def settings_of(*argv: str, environ: dict[str, str] | None = None) -> RouterSettings:
    parser = ArgumentParser("prism-router", "")
    ROUTER.add_arguments(parser)
    return ROUTER.settings_from(parser.parse_strictly(argv), environ or {})


def test_events_are_passed_on_whole_whatever_pieces_they_come_in() -> None:
    stream = b"".join(b'data: {"n": %d}\n\n' % n for n in range(20)) + b"data: [DONE]\n\n"
    for size in (1, 2, 3, 7, 16, 1000):
        events = WholeEvents()
        out = [events.take(stream[at : at + size]) for at in range(0, len(stream), size)]
        assert b"".join(out) == stream
        assert all(piece.endswith(b"\n\n") for piece in out if piece)
        assert events.rest() == b""


def test_the_rest_of_a_stream_is_what_lacks_its_blank_line() -> None:
    events = WholeEvents()
    assert events.take(b"data: 1\n\ndata: 2\n") == b"data: 1\n\n"
    assert events.rest() == b"data: 2\n"


def test_an_event_without_end_is_not_held_for_ever() -> None:
    events = WholeEvents()
    assert events.take(b"x" * LONGEST_EVENT_BYTES) == b""
    assert len(events.take(b"x")) == LONGEST_EVENT_BYTES + 1


def test_an_error_event_is_one_line_and_ends_as_its_endpoints_streams_do() -> None:
    assert error_events_from("/v1/chat/completions", b'{\n"a": 1}') == b'data: { "a": 1}\n\ndata: [DONE]\n\n'
    assert error_events_from("/v1/generate", b"{}") == b"event: error\ndata: {}\n\n"


def test_second_tries_are_paid_for_by_first_ones() -> None:
    budget = RetryBudget(share=0.5, most=2)
    assert [budget.try_retry() for _ in range(3)] == [True, True, False]
    budget.request()
    assert not budget.try_retry()
    budget.request()
    assert budget.try_retry()
    for _ in range(100):
        budget.request()
    assert [budget.try_retry() for _ in range(3)] == [True, True, False]


def test_headers_between_neighbours_are_not_passed_on() -> None:
    headers = [(b"connection", b"Keep-Alive, X-Mine"), (b"x-mine", b"1"), (b"keep-alive", b"5"), (b"accept", b"*/*")]
    assert request_headers(headers, b"id") == [(b"accept", b"*/*"), (b"x-request-id", b"id"), (b"x-prism-router", b"1")]
    head = Head(200, ((b"transfer-encoding", b"chunked"), (b"content-length", b"3"), (b"x-prism-pod", b"forged")))
    assert list(answer_headers(head)) == [(b"content-length", b"3")]


def test_retry_after_is_whole_seconds_and_never_none() -> None:
    assert [retry_after(seconds)[1] for seconds in (0.0, 0.2, 1.0, 1.5)] == [b"1", b"1", b"1", b"2"]


def test_settings_name_one_source_of_pods() -> None:
    assert settings_of("--backends", "http://a").discovery.backends == "http://a"
    assert settings_of(environ={"PRISM_DISCOVERY__SERVICE": "engines"}).discovery.service == "engines"
    for argv in ((), ("--backends", "http://a", "--service", "engines")):
        with pytest.raises(StartupError, match="exactly one of discovery"):
            settings_of(*argv)


def test_the_example_config_loads() -> None:
    settings = settings_of("--config", str(Path(__file__).parents[2] / "configs" / "router" / "kubernetes.json"))
    assert settings.discovery.service
