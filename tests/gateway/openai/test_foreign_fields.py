"""What libraries echo and other servers take is dropped, ignored and told of, or refused by its name."""

import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import orjson
import pytest

from gateway.errors import BadRequest
from gateway.http.json_body import JsonBody
from gateway.openai.bodies import ChatBody, CompletionBody
from gateway.openai.foreign_fields import (
    ECHOES,
    IGNORABLE,
    MAX_HEADER_BYTES,
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETION,
    REFUSED_IN_MESSAGE,
    Ignored,
    ignored_header,
)
from gateway.openai.limits import Limits
from gateway.openai.requests import (
    ChatRequest,
    parse_chat_request,
    parse_completion_request,
    parse_detokenize_request,
    parse_tokenize_request,
)

IGNORES = Limits(vocab_size=1000, max_model_len=4096)
REFUSES = Limits(vocab_size=1000, max_model_len=4096, unknown_fields="refuse")
BOTH = pytest.mark.parametrize("limits", [IGNORES, REFUSES], ids=["ignore", "refuse"])
HI = {"role": "user", "content": "Hi"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NOTHING = [None, [], {}]
SOMETHING = [1, 0, "", "x", True, False, [1], {"a": 1}]


def chat(limits: Limits, *messages: Any, **fields: Any) -> ChatRequest:
    body = {"model": "m", "messages": [HI, *messages], **fields}
    return parse_chat_request(JsonBody(orjson.dumps(body)), limits)


def refused(limits: Limits, *messages: Any, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refusal:
        chat(limits, *messages, **fields)
    assert refusal.value.message.startswith(refusal.value.param or "?") and refusal.value.message.endswith(".")
    return refusal.value


def answer(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": list(calls)}


def test_no_field_is_in_two_lists() -> None:
    for form, lists in ((ChatBody, (IGNORABLE, REFUSED_IN_CHAT)), (CompletionBody, (IGNORABLE, REFUSED_IN_COMPLETION))):
        names = [name for one in lists for name in one if name not in ("chat_template_kwargs", "reasoning_effort")]
        assert len(names) == len(set(names)) and not set(names) & (form.__required_keys__ | form.__optional_keys__)
    assert not ECHOES & REFUSED_IN_MESSAGE.keys()


@BOTH
@pytest.mark.parametrize("value", [*NOTHING, *SOMETHING])
def test_fields_that_libraries_echo_are_dropped(limits: Limits, value: Any) -> None:
    echoes = dict.fromkeys(ECHOES, value)
    call = {**dict.fromkeys(ECHOES - {"id"}, value), **CALL, "function": {**echoes, **CALL["function"]}}  # type: ignore[dict-item]
    answer = {**echoes, "role": "assistant", "content": "b", "tool_calls": [call]}
    part = {**echoes, "type": "text", "text": "a"}
    tool = {**echoes, "type": "function", "function": {**echoes, "name": "f"}}
    request = chat(limits, answer, {"role": "user", "content": [part]}, tools=[tool])
    plain_tool = {"type": "function", "function": {"name": "f"}}
    plain = chat(
        limits,
        {"role": "assistant", "content": "b", "tool_calls": [CALL]},
        {"role": "user", "content": "a"},
        tools=[plain_tool],
    )
    assert request == plain and not request.ignored


# as libraries have been seen to send them
SEEN = json.loads(Path(__file__).with_name("second_turns.json").read_text(encoding="utf-8"))


@BOTH
@pytest.mark.parametrize("name", SEEN)
def test_second_turns_of_clients_are_read(limits: Limits, name: str) -> None:
    request = chat(limits, *SEEN[name])
    assert not request.ignored
    assert len(request.conversation.messages) == 1 + len(SEEN[name])


def test_a_refusal_is_what_the_assistant_has_said() -> None:
    told = chat(REFUSES, *SEEN["a refusal"]).conversation.messages
    assert [message["content"] for message in told[1:]] == ["I cannot.", "No."]
    assert chat(REFUSES, *SEEN["texts in an array"]).conversation.messages[1]["content"] == "xy"
    assert chat(REFUSES, *SEEN["Claude"]).conversation.messages[2]["content"] == "b"


@BOTH
@pytest.mark.parametrize("value", NOTHING)
def test_unknown_fields_that_say_nothing_are_dropped_wherever_they_stand(limits: Limits, value: Any) -> None:
    function = {"name": "f", "arguments": "{}", "new": value}
    messages = [
        {
            "role": "assistant",
            "content": "b",
            "new": value,
            "tool_calls": [{**CALL, "new": value, "function": function}],
        },
        {"role": "user", "content": [{"type": "text", "text": "a", "new": value}]},
    ]
    tool = {"type": "function", "new": value, "function": {"name": "f", "new": value}}
    request = chat(limits, *messages, tools=[tool], new=value, stream=True, stream_options={"new": value})
    assert not request.ignored


@pytest.mark.parametrize("value", SOMETHING)
def test_other_unknown_fields_are_ignored_and_told_of_or_refused_by_their_place(value: Any) -> None:
    new = {"new": value}
    text, call, tool = {"type": "text", "text": "a"}, {**CALL["function"], **new}, {"type": "function"}  # type: ignore[dict-item]
    places: list[tuple[str, str, list[Any], dict[str, Any]]] = [
        ("new", "new", [], new),
        ("messages[].new", "messages[1].new", [{**HI, **new}], {}),
        (
            "messages[].content[].new",
            "messages[1].content[0].new",
            [{"role": "user", "content": [{**text, **new}]}],
            {},
        ),
        ("messages[].tool_calls[].new", "messages[1].tool_calls[0].new", [answer({**CALL, **new})], {}),
        (
            "messages[].tool_calls[].function.new",
            "messages[1].tool_calls[0].function.new",
            [answer({**CALL, "function": call})],
            {},
        ),
        ("tools[].new", "tools[0].new", [], {"tools": [{**tool, **new, "function": {"name": "f"}}]}),
        ("tools[].function.new", "tools[0].function.new", [], {"tools": [{**tool, "function": {"name": "f", **new}}]}),
        ("stream_options.new", "stream_options.new", [], {"stream": True, "stream_options": new}),
    ]
    for told, place, messages, fields in places:
        ignored = chat(IGNORES, *messages, **fields).ignored
        assert ignored == {told: "other"} and ignored_header(ignored) == {
            "x-sluice-ignored": quote(told, safe="/~$.[]")
        }
        assert refused(REFUSES, *messages, **fields).param == place


@pytest.mark.parametrize(
    "name", [name for name in IGNORABLE if name not in ("chat_template_kwargs", "reasoning_effort")]
)
def test_fields_of_other_servers_are_ignored_by_their_name_or_refused(name: str) -> None:
    for value in IGNORABLE[name]:
        assert not chat(REFUSES, **{name: value}).ignored
    for value in (True, 2, "x", {"a": 1}):
        assert chat(IGNORES, **{name: value}).ignored == {name: name}
        body = JsonBody(orjson.dumps({"model": "m", "prompt": "a", name: value}))
        assert parse_completion_request(body, IGNORES).ignored == {name: name}
        assert f"{name} is not supported here; leave it out or send null" in refused(REFUSES, **{name: value}).message


@BOTH
@pytest.mark.parametrize("name", REFUSED_IN_CHAT)
def test_a_field_that_would_change_an_answer_is_refused_by_name(limits: Limits, name: str) -> None:
    instead = REFUSED_IN_CHAT[name]
    for value in (None, *((instead,) if isinstance(instead, str) else instead)):
        if value != instead:
            assert chat(limits, **{name: value}) == chat(limits)
    for value in (["x"], {"a": 1}, "x"):
        refusal = refused(limits, **{name: value})
        assert refusal.param == name
        assert (f"send {instead} instead" if isinstance(instead, str) else "is not supported here") in refusal.message


@BOTH
@pytest.mark.parametrize("name", REFUSED_IN_COMPLETION)
def test_so_it_is_in_a_completion(limits: Limits, name: str) -> None:
    for value in (["x"], {"a": 1}, "x"):
        with pytest.raises(BadRequest) as refusal:
            parse_completion_request(JsonBody(orjson.dumps({"model": "m", "prompt": "a", name: value})), limits)
        assert refusal.value.param == name


@BOTH
@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, "image_url"),
        ({"type": "input_image", "image_url": "x"}, "type"),
        ({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}, "input_audio"),
        ({"type": "file", "file": {"file_id": "x"}}, "file"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "video_url"),
        ({"type": "tool_result", "tool_use_id": "x", "content": "x"}, "type"),
        ({"type": "text", "text": "x", "image_url": {"url": "x"}}, "image_url"),
        ({"image_url": {"url": "x"}}, "image_url"),
        ({"type": "text"}, "text"),
        ({"type": "text", "text": None}, "text"),
        ({"type": "text", "text": ["x"]}, "text"),
        ({"type": "refusal", "text": "x"}, "text"),
        ({"type": 5, "text": "x"}, "type"),
        ({"type": "text", "text": "x", **{str(number): 1 for number in range(100)}}, None),
        (5, None),
        ([], None),
        (None, None),
    ],
)
def test_a_part_that_is_no_text_is_refused_by_its_place_and_key(limits: Limits, part: Any, param: str | None) -> None:
    refusal = refused(limits, {"role": "user", "content": [{"type": "text", "text": "a"}, part]})
    assert refusal.param == "messages[1].content[1]" + (f".{param}" if param else "")


@BOTH
@pytest.mark.parametrize("name", REFUSED_IN_MESSAGE)
def test_an_attachment_of_a_message_is_refused_by_name(limits: Limits, name: str) -> None:
    for value in (["x"], {"id": "x"}, True):
        assert refused(limits, {**HI, name: value}).param == f"messages[1].{name}"
    assert not chat(limits, {**HI, name: None}).ignored


def test_the_other_bodies_ignore_alike() -> None:
    tokenize = JsonBody(orjson.dumps({"messages": [{**HI, "new": 1}], "store": True}))
    assert parse_tokenize_request(tokenize, IGNORES).ignored == {"store": "store", "messages[].new": "other"}
    detokenize = JsonBody(orjson.dumps({"tokens": [1], "new": 1}))
    assert parse_detokenize_request(detokenize, IGNORES).ignored == {"new": "other"}
    for parse, body in ((parse_tokenize_request, tokenize), (parse_detokenize_request, detokenize)):
        with pytest.raises(BadRequest):
            parse(body, REFUSES)


def test_the_header_is_bounded_and_plain() -> None:
    ignored = Ignored()
    ignored.add("", "a\r\nset-cookie: x, b;\u20ac")
    assert ignored_header(ignored) == {"x-sluice-ignored": "a%0D%0Aset-cookie%3A%20x%2C%20b%3B%E2%82%AC"}
    for number in range(500):
        ignored.add("messages[].", f"{number}{'x' * 100}")
    told = ignored_header(ignored)["x-sluice-ignored"]
    assert len(told) < MAX_HEADER_BYTES + 20 and told.endswith(" more")
    names = told.split(", ")
    assert names[-1] == f"and {501 - len(names[:-1])} more"


def test_every_field_is_in_the_reference() -> None:
    text = (Path(__file__).parents[3] / "docs" / "api.md").read_text(encoding="utf-8")
    lists = (IGNORABLE, REFUSED_IN_CHAT, REFUSED_IN_COMPLETION, REFUSED_IN_MESSAGE)
    assert [name for one in lists for name in one if f"`{name}`" not in text] == []
