"""The benches' client and the servers that they start: real processes, real HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from prism_server.bench import cli
from prism_server.bench.client import Answer, AnswerFailed, Client, server_sent_events, user_message
from prism_server.bench.questions import Question, draw_questions
from prism_server.bench.server_process import ServerProcess, StartProgress
from prism_server.demo_model import LAYOUT_BY_NAME
from prism_server.errors import StartupError

SMALL = {"model.threads": "1", "kv.memory_bytes": str(24 << 20)}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(SMALL) as process:
        yield process


def ask(server: ServerProcess, endpoint: str, question: Question, **fields: Any) -> tuple[Answer, list[str]]:
    """The answer, and its pieces as they came."""
    pieces: list[str] = []

    async def answer() -> Answer:
        async with Client(server.api_url) as client:
            call = client.chat if endpoint == "chat" else client.generate
            message = user_message(question.pictures, question.text)
            return await call([message], on_text=pieces.append, **({"max_tokens": 20} | fields))

    return asyncio.run(answer()), pieces


def test_both_endpoints_give_the_same_answer_with_its_costs_and_times(server: ServerProcess) -> None:
    first, second = draw_questions(2, 5, [LAYOUT_BY_NAME["scenes-2"]])
    cold, pieces = ask(server, "chat", first)
    hot, _ = ask(server, "generate", first)
    other, _ = ask(server, "chat", second)
    assert cold.text == hot.text == "".join(pieces) == first.expected
    assert (cold.usage.decoded_items, cold.usage.encoded_items, cold.usage.prefilled_media_tokens) == (2, 2, 18)
    for answer in (hot, other):
        assert (answer.usage.decoded_items, answer.usage.encoded_items, answer.usage.cached_media_tokens) == (0, 0, 18)
    assert cold.usage.prompt_tokens == hot.usage.prompt_tokens > 18
    assert cold.finish_reason == hot.finish_reason == "stop"
    assert len(cold.arrivals_ms) == len(pieces)
    assert 0 < cold.timings.first_token_ms <= cold.first_token_ms <= cold.total_ms


def test_a_refused_request_says_why(server: ServerProcess) -> None:
    question = Question("text", "hello", "Hello", "", ())
    for endpoint in ("chat", "generate"):
        with pytest.raises(AnswerFailed, match=r"HTTP 400: .*temperature"):
            ask(server, endpoint, question, temperature=-1)


def test_a_server_that_is_not_there_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["accuracy", "--base-url", "http://127.0.0.1:9", "--questions", "1"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "http://127.0.0.1:9" in line


def test_accuracy_counts_the_answers_of_a_running_server(
    server: ServerProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "accuracy.json"
    arguments = ["accuracy", "--base-url", server.api_url, "--questions", "19", "--clients", "4", "--json", str(file)]
    assert cli.main(arguments) == 0
    (run,) = json.loads(file.read_text())["runs"]
    assert run["right"] >= 15  # of 19: the model is not perfect
    assert sum(run["right_by_layout"].values()) == sum(run["right_by_task"].values()) == run["right"]
    assert run["costs"]["decoded_items"] == 37  # the pictures of one sample of each layout
    assert f"right 19 {run['right']}" in " ".join(capsys.readouterr().out.split())


def test_a_server_reports_its_start_keeps_prism_variables_out_and_stops_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PRISM_NO_SUCH_OPTION", "1")
    seen: list[StartProgress] = []
    with ServerProcess(SMALL, seen.append) as process:
        assert "ready after" in process.log()
        assert process.stop() == 0
    assert seen[-1].elapsed_s == process.ready_after_s > 0


def test_a_server_that_cannot_start_is_an_error_with_its_last_words() -> None:
    with pytest.raises(StartupError, match=r"code 2: .*int3"), ServerProcess({"kv.dtype": "int3"}):
        pass


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "COMMAND"),
        (["speed"], "speed"),
        (["accuracy", "--questions", "0"], "positive"),
        (["accuracy", "--variant", "int3"], "int3"),
        (["accuracy", "--variants", "fp8"], "did you mean --variant"),
        (["accuracy", "--set", "kv=16"], "kv.page_tokens=16"),
        (["draw", "clip-4", "somewhere"], "clip-4"),
    ],
)
def test_a_wrong_argument_is_one_clear_line_and_exit_code_2(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_draw_writes_pictures_and_their_questions(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["draw", "pages-2", str(tmp_path / "pages"), "--seed", "3"]) == 0
    files = [Path(line) for line in capsys.readouterr().out.splitlines()]
    assert [file.name for file in files] == ["picture-1.png", "picture-2.png", "questions.json"]
    assert all(file.read_bytes().startswith(b"\x89PNG") for file in files[:2])
    assert len(json.loads(files[2].read_text())) > 5


def test_server_sent_events_are_read_as_the_standard_says() -> None:
    async def lines() -> AsyncIterator[str]:
        for line in ["event: a", 'data: {"x":', "data:1}", "", ": comment", "data: b", "", "", "event: lost", ""]:
            yield line

    async def events() -> list[tuple[str, str]]:
        return [event async for event in server_sent_events(lines())]

    assert asyncio.run(events()) == [("a", '{"x":\n1}'), ("message", "b")]
