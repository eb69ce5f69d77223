"""/v1/responses, as the official client uses it: whole, streamed, parsed, with tools, in several turns."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel, Field

from tests.gateway.server_process import PATIENCE, ServerProcess, eventually

COUNT = "Count from 3 to 12."
COUNTED = "3, 4, 5, 6, 7, 8, 9, 10, 11, 12"
MODEL = "embedded"
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]
SCHEMA = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
WRONG = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 2, "maximum": 1}}, "required": ["n"]}
BAD = openai.BadRequestError
WEATHER: Any = {"type": "function", "name": "get_weather", "parameters": {**SCHEMA, "additionalProperties": False}}


class Number(BaseModel, extra="forbid"):
    value: int = Field(ge=0, le=99)


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def respond(client: openai.OpenAI) -> Any:
    """Asks for a response, which counts unless it is told otherwise."""
    counting = {"model": MODEL, "input": COUNT, "temperature": 0}
    return lambda **fields: client.responses.create(**(counting | fields))


def test_a_response_has_the_text_and_the_usage_of_a_chat(respond: Any, client: openai.OpenAI) -> None:
    response = respond(instructions="Be exact.", metadata={"a": "b"}, store=False)
    messages: Any = [{"role": "system", "content": "Be exact."}, {"role": "user", "content": COUNT}]
    chat = client.chat.completions.create(model=MODEL, messages=messages, temperature=0)
    assert response.output_text == chat.choices[0].message.content
    assert chat.usage is not None
    assert (response.usage.input_tokens, response.usage.output_tokens, response.usage.total_tokens) == (
        chat.usage.prompt_tokens, chat.usage.completion_tokens, chat.usage.total_tokens
    )  # fmt: skip
    assert (response.status, response.model, response.object, response.error) == ("completed", MODEL, "response", None)
    assert (response.instructions, response.metadata, response.temperature) == ("Be exact.", {"a": "b"}, 0)
    assert response._request_id


def test_a_turn_goes_on_with_the_items_of_the_one_before(respond: Any) -> None:
    first = respond()
    turns = [{"role": "user", "content": COUNT}, *first.output, {"role": "user", "content": "Count from 1 to 3."}]
    second = respond(input=turns)
    assert second.output_text == "1, 2, 3"
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_a_stream_is_the_same_response_in_events(respond: Any, client: openai.OpenAI) -> None:
    whole = respond()
    with client.responses.stream(model=MODEL, input=COUNT, temperature=0) as stream:
        events, final = list(stream), stream.get_final_response()
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == final.output_text == whole.output_text and len(deltas) > 5
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert final.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert {final.id} == {event.response.id for event in events if hasattr(event, "response")}


def test_an_answer_that_is_cut_is_incomplete(respond: Any) -> None:
    cut = respond(max_output_tokens=5)
    assert (cut.status, cut.incomplete_details.reason, cut.output[0].status) == (
        "incomplete", "max_output_tokens", "incomplete"
    )  # fmt: skip
    assert COUNTED.startswith(cut.output_text) and cut.usage.output_tokens == 5
    *_, last = respond(max_output_tokens=5, stream=True)
    assert (last.type, last.response.output_text) == ("response.incomplete", cut.output_text)


def test_a_text_is_parsed_as_the_model_that_it_was_asked_for(client: openai.OpenAI, respond: Any) -> None:
    parsed = client.responses.parse(model=MODEL, input="A number.", text_format=Number, max_output_tokens=200)
    assert parsed.output_parsed is not None and 0 <= parsed.output_parsed.value <= 99
    form = {"type": "json_schema", "name": "city", "schema": WEATHER["parameters"], "strict": True}
    asked: Any = {"text": {"format": form}, "max_output_tokens": 60}
    assert json.loads(respond(**asked).output_text)["city"] in ("Oslo", "Rome")
    *_, last = respond(stream=True, **asked)
    assert json.loads(last.response.output_text)["city"] in ("Oslo", "Rome")
    assert respond(text={"format": {"type": "json_object"}}, max_output_tokens=9).output_text.startswith("{")
    assert json.loads(respond(text={"format": {"type": "json_object", "schema": {"const": {"a": 1}}}}).output_text) == {
        "a": 1
    }


def test_a_function_is_called_and_its_result_answered(respond: Any, client: openai.OpenAI) -> None:
    asked: Any = {"input": ASK, "tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = respond(**asked).output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert json.loads(call.arguments)["city"] in ("Oslo", "Rome")
    with client.responses.stream(model=MODEL, temperature=0, **asked) as stream:
        deltas = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        (streamed,) = stream.get_final_response().output
    assert streamed.type == "function_call"
    assert (streamed.name, streamed.arguments) == (call.name, "".join(deltas)) and len(deltas) > 1
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
    answer = respond(input=[*ASK, call, result], tools=[WEATHER], tool_choice="none")
    assert answer.output_text and [item.type for item in answer.output] == ["message"]
    strict = openai.pydantic_function_tool(Number, name="tell")["function"]
    tool: Any = {"type": "function", **strict}
    (told,) = client.responses.parse(model=MODEL, **(asked | {"tools": [tool]})).output
    assert told.type == "function_call"
    Number.model_validate(told.parsed_arguments)


def test_log_probabilities_belong_to_the_text(respond: Any) -> None:
    for fields in ({}, {"tools": [WEATHER]}):
        asked = {"top_logprobs": 2, "include": ["message.output_text.logprobs"], **fields}
        whole = respond(**asked)
        (message,) = whole.output
        told = message.content[0].logprobs
        assert len(told) == whole.usage.output_tokens and all(len(one.top_logprobs) == 2 for one in told)
        events = list(respond(stream=True, **asked))
        streamed = [one for event in events if event.type == "response.output_text.delta" for one in event.logprobs]
        assert [(one.token, one.logprob) for one in streamed] == [(one.token, one.logprob) for one in told]
        assert events[-1].response.output[0].content[0].logprobs == told
    asked = {"input": ASK, "tools": [WEATHER], "tool_choice": "required", "top_logprobs": 1}
    assert {item.type for item in respond(**asked).output} == {"function_call"}


def test_ignored_fields_are_told(client: openai.OpenAI) -> None:
    extra = {"tools": [{"type": "web_search"}], "text": {"verbosity": "low"}, "reasoning": {"effort": "high"}}
    reply = client.responses.with_raw_response.create(model=MODEL, input=COUNT, temperature=0, extra_body=extra)
    told = reply.headers["x-sluice-ignored"]
    assert set(told.split(", ")) == {"tools[].web_search", "text.verbosity", "reasoning.effort"}
    assert reply.parse().output_text == COUNTED


@pytest.mark.parametrize(
    ("fields", "kind", "param"),
    [
        ({"input": []}, BAD, "input"),
        ({"input": "fox " * 5000}, BAD, "input"),
        ({"max_output_tokens": 0}, BAD, "max_output_tokens"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": WRONG}}}, BAD, "text.format.schema"),
        ({"tools": [{**WEATHER, "parameters": WRONG}], "tool_choice": "required"}, BAD, "tools"),
        ({"model": "gpt-5"}, openai.NotFoundError, "model"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_a_wrong_field_is_refused_before_anything_is_streamed(
    respond: Any, fields: Any, kind: type[openai.APIStatusError], param: str, stream: bool
) -> None:
    with pytest.raises(kind) as caught:
        respond(**fields, stream=stream)
    assert caught.value.param == param
    assert "json_0" not in caught.value.message, "a grammar that is not the client's"


def test_a_stream_that_is_cancelled_fails(respond: Any, server: ServerProcess) -> None:
    events = iter(respond(max_output_tokens=1900, stream=True, extra_body={"ignore_eos": True}))
    seen = [next(events) for _ in range(8)]
    response = seen[0].response.id
    server.admin(f"requests/{response}/cancel", "POST")
    with pytest.raises(openai.APIError) as raised:
        seen += events
    assert raised.value.code == "cancelled"
    assert (seen[-1].type, seen[-1].response.status) == ("response.failed", "failed")
    eventually(server.is_idle)
