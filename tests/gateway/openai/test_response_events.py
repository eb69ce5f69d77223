"""Responses and their events, as the official client's own types read them."""

import json
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.http.json_body import JsonBody
from gateway.openai.limits import Limits
from gateway.openai.replies import Choice, Ending, TokenUsage
from gateway.openai.response_events import ResponseEvents, ResponseIdentity, whole_response
from gateway.openai.response_request import parse_response_request
from tests.examples import examples
from tests.gateway.openai.random_answers import CALL, new_message, pieces, reason_of, whole

USAGE = TokenUsage(prompt_tokens=7, completion_tokens=5, cached_tokens=4, reasoning_tokens=2)
ASKED = parse_response_request(JsonBody(b'{"model": "m", "input": "Hi"}'), Limits(1000, 4096))
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
Json = dict[str, Any]


def identity() -> ResponseIdentity:
    return ResponseIdentity.of_response("m", dict(ASKED.echoed), [])


def events_of(stream: bytes) -> list[Json]:
    """The events, each as the client's types have it, under the name that it has."""
    events = []
    for event in stream.decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        EVENT.validate_python(events[-1])
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    return events


def streamed(text: list[str], is_cut: bool = False, **options: Any) -> list[Json]:
    message = new_message(**options)
    events = ResponseEvents(identity(), message)
    stream = events.start()
    for piece in text:
        message.push(piece)
        stream += events.text(piece)
    message.finish(is_cut=is_cut)
    return events_of(stream + events.finish(Ending(reason_of(message, is_cut))) + events.end(USAGE))


def without_ids(response: Json) -> Json:
    """What of a response is the same of every answer to one request that has the same text."""
    items = [{k: v for k, v in item.items() if k not in ("id", "call_id")} for item in response["output"]]
    return {**response, "output": items, "id": None, "created_at": None, "completed_at": None}


def check_items(events: list[Json]) -> None:
    """Items begin and end one after another, and what is told of one piece by piece is what it is as a whole."""
    items: dict[int, Json] = {}
    for event in events:
        if (index := event.get("output_index")) is None:
            continue
        if event["type"] == "response.output_item.added":
            assert index == len(items)
            items[index] = {"id": event["item"]["id"], "text": "", "logprobs": []}
        item = items[index]
        assert item["id"] == event.get("item_id", item["id"])
        match event["type"].rsplit(".", 1)[-1], event:
            case "delta", {"delta": delta}:
                item["text"] += delta
                item["logprobs"] += event.get("logprobs", [])
            case "done", {"text": text} | {"arguments": text}:
                assert (text, event.get("logprobs", [])) == (item["text"], item["logprobs"])
            case "done", {"item": done}:
                assert done["id"] == item["id"]
                parts = done.get("content") or [done]
                assert [part.get("text", part.get("arguments")) for part in parts] == [item["text"]]
                items[index] = item | {"whole": done}
    assert [item["whole"] for item in items.values()] == events[-1]["response"]["output"]


@given(pieces(), st.booleans(), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_a_stream_has_what_the_whole_response_has(text: list[str], is_cut: bool, shows_reasoning: bool) -> None:
    options = {"shows_reasoning": shows_reasoning}
    events = streamed(text, is_cut, **options)
    check_items(events)
    choice = whole(text, is_cut, **options)
    expected = json.loads(orjson.dumps(whole_response(identity(), choice, USAGE)))
    Response.model_validate(expected)
    assert without_ids(events[-1]["response"]) == without_ids(expected)
    assert events[-1]["type"] == ("response.incomplete" if is_cut else "response.completed")


def test_an_answer_of_three_kinds_is_three_items() -> None:
    events = streamed(["<think>hm</think>", "Well, ", CALL])
    names = [event["type"].removeprefix("response.") for event in events]
    assert [name for name, following in pairwise(["", *names]) if name != following] + names[-1:] == [
        "", "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.done", "content_part.done",
        "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done",
        "completed",
    ]  # fmt: skip
    response = Response.model_validate(events[-1]["response"])
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
    assert response.output_text == "Well,"
    assert response.usage is not None
    assert response.usage.input_tokens_details.cached_tokens == 4
    assert (response.usage.output_tokens_details.reasoning_tokens, response.usage.total_tokens) == (2, 12)


@pytest.mark.parametrize("text", [[], [""], ["Hi ", "you"]])
def test_a_text_that_nothing_parses_is_one_message(text: list[str]) -> None:
    events = ResponseEvents(identity(), None)
    stream = events.start() + b"".join(map(events.text, text))
    read = events_of(stream + events.finish(Ending("stop")) + events.end(USAGE))
    check_items(read)
    expected = json.loads(orjson.dumps(whole_response(identity(), Choice("".join(text), "stop"), USAGE)))
    assert without_ids(read[-1]["response"]) == without_ids(expected)
    assert Response.model_validate(expected).output_text == "".join(text)


def test_log_probabilities_come_with_the_text_that_they_are_about() -> None:
    """Tokens whose text is held back are told of with the next text, and the last ones before the item ends."""

    def told(text: str) -> Json:
        token = {"token": text, "logprob": -1.0, "bytes": [*text.encode()], "top_logprobs": []}
        return {"logprobs": {"content": [token], "refusal": None}}

    message = new_message()
    events, stream = ResponseEvents(identity(), message), b""
    stream += events.start()
    for piece in ("a", " <tool", "_call", "s "):
        message.push(piece)
        stream += events.text(piece, None, told(piece))
    message.finish()
    read = events_of(stream + events.finish(Ending("stop", None, told("<|end|>"))) + events.end(USAGE))
    check_items(read)
    (item,) = Response.model_validate(read[-1]["response"]).output
    assert item.type == "message" and item.content[0].type == "output_text"
    assert [one.token for one in item.content[0].logprobs or ()] == ["a", " <tool", "_call", "s ", "<|end|>"]
