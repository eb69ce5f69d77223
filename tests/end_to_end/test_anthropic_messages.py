"""/v1/messages and /v1/messages/count_tokens on the wire, as Anthropic's clients speak."""

import json
from typing import Any

import httpx
import pytest

from tests.gateway.server_process import PATIENCE, ServerProcess, eventually

HI = [{"role": "user", "content": "Count from 3 to 12."}]
COUNTED = "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
ASK = {"role": "user", "content": "What is the weather in Oslo?"}
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "input_schema": {**SCHEMA, "additionalProperties": False}}
Json = dict[str, Any]


class Client:
    """Sends what Anthropic's clients send, with the key in their header."""

    def __init__(self, server: ServerProcess) -> None:
        self.url = f"{server.url}/v1/messages"
        self.headers = {"x-api-key": server.key, "anthropic-version": "2023-06-01"}

    def post(self, path: str = "", headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "embedded", "max_tokens": 200, "temperature": 0, "messages": HI, **fields}
        return httpx.post(self.url + path, json=body, headers=headers or self.headers, timeout=PATIENCE)

    def message(self, **fields: Any) -> Json:
        reply = self.post(**fields)
        assert reply.status_code == 200, reply.text
        message: Json = reply.json()
        return message

    def events(self, **fields: Any) -> list[Json]:
        reply = self.post(stream=True, **fields)
        assert reply.headers["content-type"].startswith("text/event-stream"), reply.text
        return read_events(reply.text)


def read_events(text: str) -> list[Json]:
    events = []
    for event in text.split("\n\n")[:-1]:
        name, data = event.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Client:
    return Client(server)


def test_a_message_has_the_text_and_the_usage_of_a_chat(client: Client, server: ServerProcess) -> None:
    message = client.message(system=[{"type": "text", "text": "Be exact.", "cache_control": {"type": "ephemeral"}}])
    turns = [{"role": "system", "content": "Be exact."}, *HI]
    chat = server.post("/v1/chat/completions", model="embedded", messages=turns, temperature=0).json()
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "embedded")
    assert (message["stop_reason"], message["stop_sequence"]) == ("end_turn", None)
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert usage["output_tokens"] == chat["usage"]["completion_tokens"]


def test_a_stream_is_the_same_message_in_events(client: Client) -> None:
    long = [{"role": "user", "content": "Be exact. " * 40 + "Count from 3 to 12."}]
    whole = client.message(messages=long)
    start, block, *deltas, stop, last, end = client.events(messages=long)
    assert (start["type"], block["type"], stop["type"]) == (
        "message_start",
        "content_block_start",
        "content_block_stop",
    )
    assert (last["type"], end["type"]) == ("message_delta", "message_stop")
    assert block["content_block"] == {"type": "text", "text": ""}
    assert {delta["type"] for delta in deltas} == {"content_block_delta"} and len(deltas) > 5
    assert "".join(delta["delta"]["text"] for delta in deltas) == whole["content"][0]["text"]
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    told = start["message"]["usage"]
    assert told["cache_read_input_tokens"] > 100, "the whole message has been there"
    assert told["input_tokens"] + told["cache_read_input_tokens"] == sum(
        whole["usage"][name] for name in ("input_tokens", "cache_read_input_tokens")
    )
    assert last["usage"] == told | {"output_tokens": whole["usage"]["output_tokens"]}


def test_a_tool_is_used_and_its_results_answered(client: Client) -> None:
    asked: Any = {"tools": [WEATHER], "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    whole = client.message(messages=[ASK], **asked)
    (use,) = whole["content"]
    assert (use["type"], use["name"], whole["stop_reason"]) == ("tool_use", "get_weather", "tool_use")
    assert use["input"]["city"] in ("Oslo", "Rome")
    _, block, *deltas, _, last, _ = client.events(messages=[ASK], **asked)
    assert block["content_block"] == {**use, "id": block["content_block"]["id"], "input": {}}
    assert json.loads("".join(delta["delta"]["partial_json"] for delta in deltas)) == use["input"]
    assert last["delta"]["stop_reason"] == "tool_use"
    parts = [{"type": "text", "text": "sunny"}, {"type": "text", "text": ", 12 degrees"}]
    for content in ("sunny, 12 degrees", parts):
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": content}
        turns = [ASK, {"role": "assistant", "content": whole["content"]}, {"role": "user", "content": [result]}]
        answer = client.message(messages=turns, tools=[WEATHER], tool_choice={"type": "none"})
        assert answer["content"][0]["text"] and answer["stop_reason"] in ("end_turn", "max_tokens")
    named = {"type": "tool", "name": "get_weather"}
    assert client.message(messages=[ASK], tools=[WEATHER], tool_choice=named)["content"][0]["name"] == "get_weather"


def test_an_answer_goes_on_with_what_the_assistant_has_begun(client: Client) -> None:
    begun = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "3, 4, 5"}]}]
    assert client.message(messages=begun)["content"][0]["text"].startswith(", 6, 7")
    nothing = [*HI, {"role": "assistant", "content": ""}]
    assert client.message(messages=nothing)["content"] == client.message()["content"]


def test_why_a_message_ended(client: Client) -> None:
    for events in (False, True):
        asked = client.events if events else client.message
        ends = [asked(stop_sequences=[" 7", "x"]), asked(max_tokens=5)]
        told = [end[-2]["delta"] if isinstance(end, list) else end for end in ends]
        assert [(end["stop_reason"], end["stop_sequence"]) for end in told] == [
            ("stop_sequence", " 7"), ("max_tokens", None)
        ]  # fmt: skip
    assert client.message(stop_sequences=[" 7"])["content"][0]["text"] == "3, 4, 5, 6,"


def test_an_answer_has_the_format_that_it_was_asked_for(client: Client) -> None:
    form = {"type": "json_schema", "schema": WEATHER["input_schema"]}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        assert json.loads(client.message(**fields)["content"][0]["text"])["city"] in ("Oslo", "Rome")


def test_a_count_is_the_usage_of_its_prompt(client: Client) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": "sunny"}
    use = {"type": "tool_use", "id": "a", "name": "get_weather", "input": {"city": "Oslo"}}
    turns = [ASK, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    for fields in ({}, {"messages": turns, "tools": [WEATHER], "system": "Be brief."}):
        usage = client.message(**fields)["usage"]
        body = {"model": "embedded", "messages": HI, **fields}
        counted = httpx.post(f"{client.url}/count_tokens", json=body, headers=client.headers, timeout=PATIENCE)
        assert counted.json() == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


def test_the_key_comes_in_either_header(client: Client, server: ServerProcess) -> None:
    for headers in ({"x-api-key": server.key}, server.headers, {"x-api-key": "other", **server.headers}):
        assert client.post(headers=headers, max_tokens=1).status_code == 200
    for path in ("", "/count_tokens"):
        for headers in ({"x-api-key": "sk-wrong"}, {"accept": "*/*"}):
            reply = client.post(path, headers=headers)
            assert (reply.status_code, reply.json()["error"]["type"]) == (401, "authentication_error")
    assert httpx.get(f"{server.url}/v1/models", headers=client.headers).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_refused_in_anthropics_words(client: Client, stream: bool) -> None:
    for fields, status, kind, param in (
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"messages": [{"role": "user", "content": "fox " * 5000}]}, 400, "invalid_request_error", "messages"),
        ({"stop_sequences": [5]}, 400, "invalid_request_error", "stop_sequences[0]"),
        ({"model": "claude"}, 404, "not_found_error", "model"),
        ({"system": "x" * 5_000_000}, 413, "request_too_large", None),
    ):
        reply = client.post(stream=stream, **fields)
        error = reply.json()["error"]
        assert (reply.status_code, reply.json()["type"], error["type"], error["param"]) == (
            status,
            "error",
            kind,
            param,
        )
        assert error["message"] and reply.headers["x-request-id"]
    if not stream:
        assert client.post("/batches").json()["error"]["type"] == "not_found_error"
        assert httpx.get(client.url).json()["type"] == "error"


def test_a_stream_that_is_cancelled_ends_with_an_error(client: Client, server: ServerProcess) -> None:
    endless = {"type": "array", "items": {"type": "string", "minLength": 99}, "minItems": 99}
    form = {"format": {"type": "json_schema", "schema": endless}}
    body = {"model": "embedded", "max_tokens": 1900, "messages": HI, "stream": True, "output_config": form}
    with httpx.stream("POST", client.url, json=body, headers=client.headers, timeout=PATIENCE) as stream:
        parts = stream.iter_text()
        text = next(parts)
        server.admin(f"requests/{read_events(text)[0]['message']['id']}/cancel", "POST")
        last = read_events(text + "".join(parts))[-1]
    assert (last["type"], last["error"]["type"], last["error"]["code"]) == ("error", "overloaded_error", "cancelled")
    eventually(server.is_idle)
