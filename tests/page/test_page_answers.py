"""What the page makes of answers that a server gives seldom (refusals, broken streams, markup), and of keys."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from page_browser import SMALL, OpenPage, ask, bar_width, carried, drop, finished, rows
from playwright.sync_api import Browser, Page, Route, expect

from prism_server.bench.page_examples import encode_gif, examples
from prism_server.bench.server_process import ServerProcess

GENERATE = "**/v1/generate"
TIMINGS = {
    "queue_ms": 1.0,
    "media_ms": 2.0,
    "prefill_ms": 9.0,
    "encode_ms": 4.0,
    "first_token_ms": 12.0,
    "total_ms": 20,
}
USAGE = {"prompt_tokens": 100, "completion_tokens": 2, "cached_tokens": 30}
COST = {"decoded_items": 1, "encoded_items": 0, "prefilled_tokens": 70, "prefilled_media_tokens": 60}
DONE = {
    "samples": [{"sample": 0, "finish_reason": "stop"}],
    "usage": USAGE,
    "prism": COST | {"prefilled_text_tokens": 10, "timings": TIMINGS},
}

DROP_FILM = """bytes => {
    const piece = new Blob([new Uint8Array(bytes / 10)]);
    const carried = new DataTransfer();
    carried.items.add(new File(Array(10).fill(piece), "film.mp4", { type: "video/mp4" }));
    dispatchEvent(new DragEvent("drop", { bubbles: true, cancelable: true, dataTransfer: carried }));
}"""


def event(name: str, data: Any) -> str:
    return f"event: {name}\ndata: {json.dumps(data)}\n\n"


def token(text: str) -> str:
    return event("token", {"sample": 0, "token_ids": [1], "text": text})


def answer_with(page: Page, body: str, status: int = 200, **headers: str) -> list[Any]:
    """Every request is answered so; the list gets their bodies."""
    asked: list[Any] = []

    def answer(route: Route) -> None:
        asked.append(route.request.post_data_json)
        kind = "text/event-stream" if status == 200 else "application/json"
        route.fulfill(status=status, headers={"content-type": kind} | headers, body=body)

    page.route(GENERATE, answer)
    return asked


def drop_clip(page: Page) -> None:
    clip = examples()[-1].files[0]
    drop(page, carried("clip.gif", encode_gif(clip.frames), "image/gif"))


def test_what_moves_is_sent_as_a_clip_and_a_refusal_names_the_file(open_page: OpenPage) -> None:
    page = open_page()
    param = "messages[0].content[0].video_url.url"
    refusal = {"message": "no clips today", "type": "invalid_request_error", "param": param, "code": None}
    asked = answer_with(page, json.dumps({"error": refusal}), 400)
    drop_clip(page)
    entry = ask(page, "What happens?")
    (message,) = asked[0]["messages"]
    assert [part["type"] for part in message["content"]] == ["video_url", "text"]
    assert message["content"][0]["video_url"]["url"].startswith("data:image/gif;base64,R0lGOD")
    expect(entry.locator(".verdict")).to_have_text("clip.gif: no clips today.")
    expect(entry.locator(".bars")).to_have_count(0)


def test_a_still_gif_is_a_picture(open_page: OpenPage) -> None:
    page = open_page()
    asked = answer_with(page, event("done", DONE))
    drop(page, carried("still.gif", encode_gif(examples()[-1].files[0].frames[:1]), "image/gif"))
    ask(page, "What is it?")
    assert [part["type"] for part in asked[0]["messages"][0]["content"]] == ["image_url", "text"]


def test_an_overloaded_server_is_quoted_with_its_time(open_page: OpenPage) -> None:
    page = open_page()
    error = {"message": "256 requests wait, the limit", "type": "overloaded_error", "param": None, "code": None}
    answer_with(page, json.dumps({"error": error}), 429, **{"retry-after": "3"})
    verdict = ask(page, "Hello?").locator(".verdict")
    expect(verdict).to_have_text("256 requests wait, the limit. Try again in 3 s.")


def test_a_stream_that_breaks_off_keeps_its_text_and_says_so(open_page: OpenPage) -> None:
    page = open_page()
    accepted = event("accepted", {"usage": USAGE})
    answer_with(page, accepted + token("half an ") + event("error", {"error": {"message": "the engine stopped"}}))
    entry = ask(page, "First")
    expect(entry.locator(".answer")).to_have_text("half an ")
    expect(entry.locator(".verdict")).to_have_text("the engine stopped.")
    page.unroute(GENERATE)
    answer_with(page, accepted + ": a comment\n\n" + token("half"))
    expect(ask(page, "Second").locator(".verdict")).to_contain_text("broke off")


def test_markup_in_an_answer_stays_text(open_page: OpenPage) -> None:
    page = open_page()
    markup = '<img src=x onerror="window.owned=1"><script>window.owned=1</script>\n**bold**'
    answer_with(page, token(markup) + event("done", DONE))
    entry = ask(page, "<b>What?</b>")
    expect(entry.locator(".answer")).to_have_text(markup)
    assert entry.locator(".answer *").count() == entry.locator("h3 b").count() == 0
    assert page.evaluate("window.owned") is None


def test_a_partly_known_request_is_told_as_it_was(open_page: OpenPage) -> None:
    page = open_page()
    answer_with(page, token("yes") + event("done", DONE))
    drop_clip(page)
    entry = ask(page, "Known?")
    said = entry.locator(".verdict").inner_text()
    assert said == "1 of 1 clip decoded, 0 encoded, 60 clip tokens prefilled."
    texts = [" ".join(row.split()) for row in entry.locator(".row").all_inner_texts()]
    assert texts == [
        "Waiting 1 ms",
        "Decode 2 ms 1 clip",
        "Encode 4 ms",
        "Prefill 5 ms 70 tokens",
        "First token 12 ms",
        "Reused 30 of 100 tokens",
    ]


def test_the_bars_of_all_questions_share_one_scale(open_page: OpenPage) -> None:
    page = open_page(reduced_motion="reduce")
    entries = []
    for first_token_ms in (800.0, 200.0):
        timings = TIMINGS | {"first_token_ms": first_token_ms}
        answer_with(page, token("yes") + event("done", DONE | {"prism": DONE["prism"] | {"timings": timings}}))
        entries.append(ask(page, "What is the total?"))
    widths = [bar_width(rows(entry)["first"]) for entry in entries]
    assert widths[1] / widths[0] == pytest.approx(0.25, abs=0.01)
    expect(page.locator("#scale")).to_have_text("Bars: 0 to 800 ms")


def test_escape_stops_a_question(open_page: OpenPage) -> None:
    page = open_page()
    page.route(GENERATE, lambda route: None)  # no answer, ever
    page.get_by_label("Question", exact=True).fill("Are you there?")
    page.get_by_role("button", name="Ask").click()
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.keyboard.press("Escape")
    expect(finished(page, 1).locator(".verdict")).to_have_text("Stopped before an answer came.")
    expect(page.get_by_role("button", name="Ask")).to_be_visible()


def test_a_stopped_question_is_no_error_and_a_phone_stops_it_at_the_answer(open_page: OpenPage) -> None:
    page = open_page(viewport={"width": 360, "height": 720}, is_mobile=True, has_touch=True)
    page.route(GENERATE, lambda route: None)
    page.get_by_label("Question", exact=True).fill("Are you there?")
    page.keyboard.press("Enter")
    page.locator(".entry").get_by_role("button", name="Stop").tap()
    entry = finished(page, 1)
    expect(entry).to_have_class("entry is-stopped")
    expect(entry.get_by_role("alert")).to_have_count(0)
    expect(page.get_by_role("button", name="Stop")).to_have_count(0)
    assert page.evaluate("document.activeElement.id") == "ask", "the focus must not fall out of the page"


def test_a_long_answer_scrolls_in_itself_and_is_shown_to_its_end(open_page: OpenPage) -> None:
    page = open_page()
    words = "a long answer goes on " * 200
    end = event("done", DONE | {"samples": [{"sample": 0, "finish_reason": "length"}]})
    answer_with(page, "".join(map(token, words.split(" "))) + end)
    entry = ask(page, "Why?")
    expect(entry.locator(".cut")).to_be_in_viewport()
    expect(entry.locator(".bars")).to_be_in_viewport()
    answer = entry.locator(".answer")
    assert answer.evaluate("node => node.scrollTop > 0 && node.scrollTop + node.clientHeight >= node.scrollHeight - 1")
    assert answer.evaluate("node => node.tabIndex") == 0, "a keyboard scrolls it"


def test_the_next_question_replaces_the_last_one_without_erasing_it_first(open_page: OpenPage) -> None:
    page = open_page()
    asked = answer_with(page, event("done", DONE))
    ask(page, "First?")
    page.keyboard.type("Second?")
    page.keyboard.press("Enter")
    finished(page, 2)
    assert [body["messages"][0]["content"][-1]["text"] for body in asked] == ["First?", "Second?"]


def test_a_file_that_the_browser_cannot_show_is_named_by_its_kind(open_page: OpenPage) -> None:
    page = open_page()
    drop(page, carried("broken.png", b"no picture"), carried("film.mkv", b"no film", "video/x-matroska"))
    expect(page.locator(".tile .placard")).to_have_text(["PNG", "MKV"])
    entry = ask(page, "What is it?")
    expect(entry.locator(".strip .placard")).to_have_text(["PNG", "MKV"])
    expect(entry.locator(".verdict")).to_contain_text("broken.png: ")


def test_files_that_are_too_large_are_refused_with_their_size(open_page: OpenPage) -> None:
    page = open_page()
    error = {"message": "the body is too large", "type": "invalid_request_error", "param": None, "code": None}
    asked = answer_with(page, json.dumps({"error": error}), 413)
    drop(page, carried("large.png", bytes(3_000_000)))
    said = ask(page, "Does it fit?").locator(".verdict")
    expect(said).to_have_text("All files together have 3 MB: the body is too large.")
    page.evaluate(DROP_FILM, 260_000_000)
    expect(page.locator(".tile")).to_have_count(2)
    expect(ask(page, "And now?").locator(".verdict")).to_have_text(
        "All files together have 263 MB, more than a browser can send at once."
    )
    assert len(asked) == 1, "the second was not sent"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text("sesame\n")
    with ServerProcess(SMALL | {"http.api_keys_file": str(keys)}) as server:
        yield server


def test_a_server_that_wants_a_key_is_given_one_for_this_tab(open_page: OpenPage, guarded: ServerProcess) -> None:
    page = open_page(guarded.api_url)
    expect(page.locator("#model")).to_contain_text("wants a key")
    page.get_by_label("Question", exact=True).fill("What is your name?")
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_label("API key")).to_be_focused()
    page.keyboard.type("wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("The key is not valid.")
    page.keyboard.type("sesame")
    page.keyboard.press("Enter")
    expect(finished(page, 1)).to_have_class("entry is-done")
    expect(page.locator("#model")).to_have_text("demo")
    page.reload()
    expect(page.locator("#model")).to_have_text("demo")
    assert page.evaluate("localStorage.length") == 0
    page.get_by_role("button", name="Forget the key").click()
    expect(page.locator("#model")).to_contain_text("wants a key")


def test_no_key_given_is_the_end_of_the_question(open_page: OpenPage, guarded: ServerProcess) -> None:
    page = open_page(guarded.api_url)
    page.get_by_label("Question", exact=True).fill("Anyone?")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Cancel").click()
    expect(finished(page, 1).locator(".verdict")).to_contain_text("an API key is needed")


def test_a_server_that_cannot_be_reached_is_looked_for_again(browser: Browser, open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#model")).to_have_attribute("data-state", "ready")
    page.route("**/v1/models", lambda route: route.abort())
    page.evaluate("document.querySelector('#key').click()")
    expect(page.locator("#model")).to_have_attribute("data-state", "away")
    page.unroute("**/v1/models")
    expect(page.locator("#model")).to_have_attribute("data-state", "ready")


def test_a_server_that_has_gone_is_noticed_by_the_question_that_it_does_not_answer(open_page: OpenPage) -> None:
    page = open_page()
    expect(page.locator("#model")).to_have_attribute("data-state", "ready")
    page.route("**/v1/*", lambda route: route.abort())
    expect(ask(page, "Still there?").locator(".verdict")).to_contain_text("cannot be reached")
    expect(page.locator("#model")).to_have_text("No answer from the server")
    page.unroute("**/v1/*")
    expect(page.locator("#model")).to_have_text("demo")
