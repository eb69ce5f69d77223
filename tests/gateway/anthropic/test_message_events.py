"""Messages and their events: a client that puts a stream together has the message that another gets whole."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.anthropic.errors import error_reply
from gateway.anthropic.message_events import MessageEvents, MessageIdentity, whole_message
from gateway.errors import ApiError, BadRequest, DeadlineExceeded, Forbidden, InvalidApiKey, Overloaded
from gateway.openai.replies import Choice, ContentBlock, Ending, TokenUsage
from tests.examples import examples
from tests.gateway.openai.random_answers import CALL, new_message, pieces, reason_of, whole

BEGUN = TokenUsage(prompt_tokens=7, completion_tokens=1, cached_tokens=4)
USAGE = TokenUsage(prompt_tokens=7, completion_tokens=5, cached_tokens=4)
Json = dict[str, Any]


def events_of(stream: bytes) -> list[Json]:
    events = []
    for event in stream.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def streamed(text: list[str], is_cut: bool = False, stop: str | None = None, plain: bool = False) -> list[Json]:
    message = None if plain else new_message()
    events = MessageEvents(MessageIdentity.of_message("m"), message)
    stream = events.start(BEGUN)
    for piece in text:
        if message is not None:
            message.push(piece)
        stream += events.text(piece, BEGUN)
    if message is not None:
        message.finish(is_cut=is_cut)
    reason = ("length" if is_cut else "stop") if message is None else reason_of(message, is_cut)
    return events_of(stream + events.finish(Ending(reason, USAGE, None, stop)) + events.end(USAGE))


def accumulated(events: list[Json]) -> Json:
    """The message that Anthropic's clients make of a stream."""
    start, *events, delta, stop = events
    assert (start["type"], delta["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
    message: Json = start["message"]
    arguments, is_open = "", False
    for event in events:
        if event["type"] == "content_block_start":
            assert not is_open and event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            arguments, is_open = "", True
            continue
        block = message["content"][event["index"]]
        assert is_open and event["index"] == len(message["content"]) - 1
        match event:
            case {"delta": {"type": "text_delta", "text": text}}:
                block["text"] += text
            case {"delta": {"type": "thinking_delta", "thinking": text}}:
                block["thinking"] += text
            case {"delta": {"type": "input_json_delta", "partial_json": text}}:
                arguments += text
            case {"type": "content_block_stop"}:
                is_open = False
                if block["type"] == "tool_use":
                    block["input"] = as_object(arguments)
            case _:
                raise AssertionError(event)
    assert not is_open
    return message | delta["delta"] | {"usage": delta["usage"]}


def as_object(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except json.JSONDecodeError:
        return {}


def without_ids(message: Json) -> Json:
    content = [{**block, "id": None} for block in message["content"]]
    return {**message, "content": content, "id": None}


@given(pieces(), st.booleans(), st.none() | st.just("stop"))
@settings(max_examples=examples(60), deadline=None)
def test_a_stream_has_what_the_whole_message_has(text: list[str], is_cut: bool, stop: str | None) -> None:
    choice = whole(text, is_cut)
    choice.stop_string = stop
    expected = json.loads(whole_message(MessageIdentity.of_message("m"), choice, USAGE))
    assert without_ids(accumulated(streamed(text, is_cut, stop))) == without_ids(expected)
    assert expected["content"]


@pytest.mark.parametrize("text", [[], ["Hi ", "you"]])
def test_a_text_that_nothing_parses_is_one_block(text: list[str]) -> None:
    expected = json.loads(whole_message(MessageIdentity.of_message("m"), Choice("".join(text), "stop"), USAGE))
    assert without_ids(accumulated(streamed(text, plain=True))) == without_ids(expected)
    assert expected["content"] == [{"type": "text", "text": "".join(text)}]


def test_usage_is_true_from_the_first_event() -> None:
    start, *_, delta, _ = streamed(["Hi"])
    first, last = start["message"]["usage"], delta["usage"]
    for usage in (first, last):
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (3, 4)
    assert (first["output_tokens"], last["output_tokens"]) == (1, 5)


@pytest.mark.parametrize(
    ("text", "is_cut", "stop", "reason"),
    [
        (["Hi"], False, None, "end_turn"),
        (["Hi"], True, None, "max_tokens"),
        (["Hi"], False, "5", "stop_sequence"),
        ([CALL], False, None, "tool_use"),
    ],
)
def test_why_it_ended_is_said_in_anthropics_words(text: list[str], is_cut: bool, stop: str | None, reason: str) -> None:
    message = accumulated(streamed(text, is_cut, stop))
    assert (message["stop_reason"], message["stop_sequence"]) == (reason, stop)


def test_arguments_may_be_nested_more_deeply_than_a_library_writes() -> None:
    deep = '{"a":' * 600 + "1" + "}" * 600
    choice = Choice("", "tool_calls", message={}, blocks=[ContentBlock("call", "a", "f", deep)])
    assert deep.encode() in whole_message(MessageIdentity.of_message("m"), choice, USAGE)


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (BadRequest("x", "max_tokens"), 400, "invalid_request_error"),
        (InvalidApiKey("x"), 401, "authentication_error"),
        (Forbidden("x"), 403, "permission_error"),
        (Overloaded("x"), 529, "overloaded_error"),
        (DeadlineExceeded("x"), 504, "timeout_error"),
    ],
)
def test_an_error_is_of_anthropics_types(error: ApiError, status: int, kind: str) -> None:
    told, body = error_reply(error)
    read = json.loads(body)
    assert (told, read["type"], read["error"]["type"]) == (status, "error", kind)
    assert (read["error"]["message"], read["error"]["param"]) == (error.message, error.param)
