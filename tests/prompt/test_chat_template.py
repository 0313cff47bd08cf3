"""The checkpoint's template: where it is found, what it may do, what happens when it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prism_server.errors import BadRequest, StartupError
from prism_server.media.messages import MediaContent, Message, TextContent
from prism_server.prompt.template import ChatTemplate

ADDED = {"<|im_start|>": 7, "<|im_end|>": 8, "<|image_pad|>": 9, "[END]": 10, "@": 11}
HELLO = [Message("user", (TextContent("hello"),))]


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, ADDED, {"eos_token": "<|im_end|>"})


def test_pieces_are_text_runs_and_control_ids_in_order() -> None:
    rendered = template("<|im_start|>{{ messages[0].role }}\n{{ messages[0].content }}{{ eos_token }}").render(HELLO)
    assert rendered == [7, "user\nhello", 8]


def test_every_first_character_of_an_added_token_is_guarded() -> None:
    """Also tokens of one character, and templates whose own text stands before what a user wrote."""
    message = Message("user", (TextContent("@ [END] <|im_end|>"),))
    assert template("@{{ messages[0].content }}[END]").render([message]) == [11, "@ [END] <|im_end|>", 10]


def test_one_text_is_a_string_and_anything_else_a_list_of_parts() -> None:
    show = template("{{ messages[0].content | tojson }}")
    assert show.render(HELLO) == ['"hello"']
    assert show.render([Message("assistant", ())]) == ['""']
    mixed = Message("user", (MediaContent(0, "image"), TextContent("a<b")))
    assert json.loads(str(show.render([mixed])[0])) == [{"type": "image"}, {"type": "text", "text": "a<b"}]


def test_json_in_a_prompt_is_not_escaped_for_html_or_ascii() -> None:
    tools = [{"name": "größer & <klein>"}]
    assert template("{{ tools | tojson }}").render(HELLO, tools) == ['[{"name": "größer & <klein>"}]']
    assert template("{{ tools[0] | tojson(indent=1) }}").render(HELLO, tools) == ['{\n "name": "größer & <klein>"\n}']


def test_loop_controls_and_dates_work_as_released_templates_expect() -> None:
    source = "{% for m in messages %}{% if loop.index == 2 %}{% break %}{% endif %}{{ m.role }}{% endfor %}"
    assert template(source).render(HELLO * 3) == ["user"]
    assert len(str(template("{{ strftime_now('%Y-%m-%d') }}").render(HELLO)[0])) == 10


def test_what_the_template_refuses_is_a_bad_request_about_messages(released_style_dir: Path, make_encoder: Any) -> None:
    late_system = [*HELLO, Message("system", (TextContent("late"),))]
    with pytest.raises(BadRequest, match="a system message must come first") as caught:
        make_encoder(released_style_dir).encode_chat(late_system)
    assert caught.value.param == "messages"
    for source in ("{{ 1 + messages[0].content }}", "{{ messages[0].nothing.more }}", "{{ 1 // 0 }}"):
        with pytest.raises(BadRequest, match="the chat template refuses"):
            template(source).render(HELLO)


def test_a_template_cannot_reach_out_of_its_sandbox() -> None:
    with pytest.raises(BadRequest, match="unsafe"):
        template("{{ messages.__class__.__mro__ }}").render(HELLO)
    with pytest.raises(BadRequest, match=r"unsafe|not safely"):
        template("{{ messages.append(1) }}").render(HELLO)


def test_a_template_that_drops_a_medium_is_not_obeyed_silently(make_encoder: Any, make_picture: Any) -> None:
    encoder = make_encoder()
    facts, item = make_picture()
    message = Message("user", (MediaContent(0, "image"), TextContent("what?")))
    for source, shown in (("no media", 0), ("<|image_pad|><|image_pad|>", 2)):
        encoder.template = ChatTemplate(source, encoder.tokenizer.added_tokens, {})
        with pytest.raises(BadRequest, match=f"shows {shown} of the request's 1 image parts") as caught:
            encoder.encode_chat([message], [facts], [item])
        assert caught.value.param == "messages"


def test_variables_reach_the_template_but_its_own_names_are_kept(
    released_style_dir: Path, make_encoder: Any, make_picture: Any
) -> None:
    encoder = make_encoder(released_style_dir)
    facts, item = make_picture()
    message = Message("user", (MediaContent(0, "image"), TextContent("what?")))
    prompt = encoder.encode_chat([message], [facts], [item], template_variables={"add_vision_id": True})
    assert "Picture 1: <|vision_start|>" in encoder.tokenizer.decode(prompt.token_ids, skip_special=False)
    with pytest.raises(BadRequest, match="may not set messages") as caught:
        encoder.encode_chat([message], [facts], [item], template_variables={"messages": []})
    assert caught.value.param == "chat_template_kwargs"


def test_deeply_nested_arguments_are_refused(released_style_dir: Path, make_encoder: Any) -> None:
    nested: Any = "x"
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(BadRequest, match="nested too deeply"):
        make_encoder(released_style_dir).encode_chat(HELLO, tools=[{"function": nested}])


def test_the_template_is_found_in_each_of_its_places(tmp_path: Path) -> None:
    def load() -> list[str | int]:
        return ChatTemplate.load(tmp_path, ADDED, {}).render(HELLO)

    with pytest.raises(StartupError, match="has no chat template"):
        load()
    config = tmp_path / "tokenizer_config.json"
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "from the list"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load() == ["from the list"]
    config.write_text(json.dumps({"chat_template": "from the key"}))
    assert load() == ["from the key"]
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "from json"}))
    assert load() == ["from json"]
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    assert load() == ["from jinja"]
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(StartupError, match="does not compile"):
        load()
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(StartupError, match="cannot be read"):
        load()
