"""Tools, as the official client uses them: calls come whole or streamed, in several turns, and only valid where that is
promised.
"""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from tests.gateway.server_process import PATIENCE, ServerProcess

MODEL = "embedded"
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
CLOCK: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
SCHEMAS = {"get_weather": WEATHER, "get_time": CLOCK}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"Call {name}.", "parameters": schema}}
    for name, schema in SCHEMAS.items()
]
ASK = [{"role": "user", "content": "What is the weather in Oslo?"}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def chat(client: openai.OpenAI) -> Any:
    fields = {"model": MODEL, "messages": ASK, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    return lambda **others: client.chat.completions.create(**(fields | others))


def check(calls: Any) -> list[dict[str, Any]]:
    """Return the arguments of calls, which must be valid."""
    assert calls
    found = []
    for call in calls:
        assert call.type == "function" and call.id
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, SCHEMAS[call.function.name])
        found.append(arguments)
    return found


@pytest.mark.parametrize("seed", range(3))
def test_a_required_call_is_made_and_valid(chat: Any, seed: int) -> None:
    (choice,) = chat(tool_choice="required", parallel_tool_calls=False, temperature=1.5, seed=seed).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert len(check(choice.message.tool_calls)) == 1


def test_a_named_function_is_called(chat: Any) -> None:
    named = {"type": "function", "function": {"name": "get_time"}}
    (choice,) = chat(tool_choice=named).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["get_time"]
    assert check(choice.message.tool_calls) == [{}]


def test_a_stream_of_a_call_accumulates_to_the_same_message(chat: Any, client: openai.OpenAI) -> None:
    asked = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 7, "temperature": 1}
    whole = chat(**asked).choices[0]
    chunks = list(chat(stream=True, **asked))
    deltas = [delta for chunk in chunks if chunk.choices for delta in chunk.choices[0].delta.tool_calls or ()]
    first, *later = deltas
    assert (first.index, first.type, first.function.arguments) == (0, "function", "")
    assert first.id and first.function.name == whole.message.tool_calls[0].function.name
    assert len(later) > 1 and all(delta.id is None and delta.function.name is None for delta in later)
    assert "".join(delta.function.arguments for delta in later) == whole.message.tool_calls[0].function.arguments
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    fields: Any = {"model": MODEL, "messages": ASK, "tools": TOOLS, "max_tokens": 120, **asked}
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion().choices[0]
    told, expected = final.message.tool_calls[0].function, whole.message.tool_calls[0].function  # type: ignore[index]
    assert (told.name, told.arguments) == (expected.name, expected.arguments)
    assert final.finish_reason == "tool_calls"


def test_the_result_of_a_call_goes_on_with_the_conversation(chat: Any) -> None:
    message = chat(tool_choice="required", parallel_tool_calls=False).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 degrees"}
    turns = [*ASK, message.model_dump(exclude_none=True), result]
    (choice,) = chat(messages=turns, tool_choice="none").choices
    assert choice.message.content and not choice.message.tool_calls
    assert choice.finish_reason in ("stop", "length")


def test_a_message_goes_back_as_the_client_has_parsed_it(chat: Any, client: openai.OpenAI) -> None:
    tool = {"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}
    choice: Any = {"type": "function", "function": {"name": tool["function"]["name"]}}
    asked: Any = {"model": MODEL, "messages": ASK, "tools": [tool], "tool_choice": choice, "max_tokens": 120}
    message = client.chat.completions.parse(**asked).choices[0].message
    assert message.tool_calls
    assert message.tool_calls[0].function.parsed_arguments is not None
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "12 degrees"}
    assert chat(messages=[*ASK, message, result], tool_choice="none").choices[0].message.content


def test_several_answers_have_ids_of_their_own(chat: Any) -> None:
    choices = chat(tool_choice="required", n=3, temperature=1, parallel_tool_calls=False).choices
    ids = {call.id for choice in choices for call in choice.message.tool_calls}
    assert len(choices) == len(ids) == 3


def test_a_call_that_is_cut_short_is_told_as_it_is(chat: Any) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    whole = chat(tool_choice=named).choices[0].message.tool_calls[0].function.arguments
    usage = chat(tool_choice=named).usage
    cut = chat(tool_choice=named, max_tokens=usage.completion_tokens - 6).choices[0]
    assert cut.finish_reason == "length"
    arguments = cut.message.tool_calls[0].function.arguments
    assert whole.startswith(arguments) and arguments != whole
    for stop, reason in (([whole[2:5]], "stop"), (["what it does not say"], "tool_calls")):
        assert chat(tool_choice=named, stop=stop).choices[0].finish_reason == reason
    told = chat(tool_choice=named, extra_body={"return_token_ids": True}).choices[0].token_ids
    once = next(token for token in reversed(told[:-6]) if told.count(token) == 1)
    cut = chat(tool_choice=named, extra_body={"stop_token_ids": [once]}).choices[0]
    assert cut.finish_reason == "stop" and cut.message.tool_calls


def test_only_tools_that_are_allowed_are_called(chat: Any) -> None:
    some = [{"type": "function", "function": {"name": "get_time"}}]
    for mode, seeds in (("required", range(3)), ("auto", range(6))):
        choice = {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": some}}
        for seed in seeds:
            (answer,) = chat(tool_choice=choice, temperature=1.2, seed=seed, parallel_tool_calls=False).choices
            calls = answer.message.tool_calls or []
            assert {call.function.name for call in calls} <= {"get_time"} and (calls or mode == "auto")


def test_unenforced_parts_of_arguments_are_told_in_a_header(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"n": {"const": 1}}, "required": ["n"], "if": {}, "then": {}}
    tools: Any = tool(parameters={**parameters, "additionalProperties": False})
    asked: Any = {"model": MODEL, "messages": ASK, "tools": tools, "tool_choice": "required", "max_tokens": 60}
    reply = client.chat.completions.with_raw_response.create(**asked)
    assert reply.headers["x-sluice-ignored"] == "tools[0].function.parameters/if"
    (call, *_) = reply.parse().choices[0].message.tool_calls or ()
    assert call.type == "function" and json.loads(call.function.arguments) == {"n": 1}


def test_arguments_that_name_a_token_are_whole(chat: Any) -> None:
    texts = ["<|end|>", "a</tool_call>b", "cafe\u0301"]
    properties = {"token": {"enum": [texts[0]]}, "rest": {"const": texts[1:]}}
    tools = tool(parameters={"type": "object", "properties": properties, "required": ["token", "rest"]})
    tools[0]["function"]["parameters"]["additionalProperties"] = False
    (choice,) = chat(tools=tools, tool_choice="required", parallel_tool_calls=False).choices
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"token": texts[0], "rest": texts[1:]}


def test_strict_functions_are_called_with_valid_arguments_or_not_at_all(chat: Any) -> None:
    strict = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    for seed in range(3):
        (choice,) = chat(tools=strict, temperature=1.2, seed=seed).choices
        for call in choice.message.tool_calls or ():
            if choice.finish_reason == "tool_calls":
                check([call])


def test_content_of_a_schema_or_a_call(chat: Any) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    (choice,) = chat(response_format=form).choices
    if choice.message.tool_calls:
        check(choice.message.tool_calls)
    else:
        jsonschema.validate(json.loads(choice.message.content), schema)


def test_log_probabilities_of_a_call(chat: Any) -> None:
    asked = {"tool_choice": "required", "parallel_tool_calls": False, "logprobs": True}
    whole = chat(**asked)
    told = [token.token for token in whole.choices[0].logprobs.content]
    assert len(told) == whole.usage.completion_tokens
    chunks = [chunk for chunk in chat(stream=True, **asked) if chunk.choices]
    streamed = [
        token.token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content
    ]
    assert streamed == told


def tool(**function: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", **function}}]


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"tools": tool() * 129}, "tools", "at most 128 items"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools[0].type", "must be 'function'"),
        (
            {"tools": tool(strict=True, parameters={"type": "object", "properties": {"a": {"not": {"const": 1}}}})},
            "tools[0].function.parameters",
            "#/properties/a/not",
        ),
        ({"documents": [{"text": "x"}]}, "documents", "has no effect"),
        ({"thinking_token_budget": 5}, "thinking_token_budget", "answers have no reasoning"),
        (
            {"structured_outputs": {"regex": "a"}, "tool_choice": "auto"},
            "structured_outputs.regex",
            "cannot be combined with tools",
        ),
    ],
)
def test_a_wrong_value_is_refused_by_its_place(
    server: ServerProcess, fields: dict[str, Any], param: str, message: str
) -> None:
    body = {"model": MODEL, "messages": ASK, "tools": tool(), "max_tokens": 1, **fields}
    headers = {"authorization": f"Bearer {server.key}"}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert message.replace(".", "") in error["message"].replace('"', "").replace(".", "") or message in error["message"]


def test_an_answer_goes_on_with_the_last_message(chat: Any) -> None:
    begun = [{"role": "user", "content": "Count from 3 to 12."}, {"role": "assistant", "content": "3, 4, 5"}]
    extra = {"continue_final_message": True}
    (choice,) = chat(messages=begun, tools=openai.NOT_GIVEN, extra_body=extra).choices
    assert choice.message.content.startswith(", 6, 7")
