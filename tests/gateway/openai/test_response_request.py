"""The bodies of /v1/responses."""

import json
from dataclasses import replace
from typing import Any

import orjson
import pytest

from backend.grammar import GrammarKind
from gateway.errors import BadRequest
from gateway.http.json_body import JsonBody
from gateway.openai.limits import Limits
from gateway.openai.requests import NO_DETAILS, TokenDetails
from gateway.openai.response_request import ENCRYPTED, LOGPROBS, ResponseRequest, ResponsesBody, parse_response_request

IGNORES = Limits(vocab_size=1000, max_model_len=4096)
REFUSES = Limits(vocab_size=1000, max_model_len=4096, unknown_fields="refuse")
HOSTED = [{"type": "web_search"}, {"type": "file_search", "vector_store_ids": ["x"]}]
TOOL: dict[str, Any] = {"type": "function", "name": "f", "parameters": {"type": "object"}}
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "integer"}}
STRICT = {**SCHEMA, "strict": True}


def asked(limits: Limits = IGNORES, **fields: Any) -> ResponseRequest:
    return parse_response_request(JsonBody(orjson.dumps({"model": "m", "input": "Hi", **fields})), limits)


def refused(limits: Limits = IGNORES, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refusal:
        asked(limits, **fields)
    assert refusal.value.message.endswith(".")
    return refusal.value


def test_the_least_request_and_one_of_nulls_are_the_same() -> None:
    least = asked()
    nulls: dict[str, Any] = dict.fromkeys(ResponsesBody.__annotations__.keys() - {"model", "input"})
    of_nulls = asked(REFUSES, **nulls)
    assert orjson.dumps(of_nulls.echoed) == orjson.dumps(least.echoed)
    assert replace(of_nulls, echoed={}) == replace(least, echoed={})
    assert [*least.conversation.messages] == [{"role": "user", "content": "Hi"}]
    assert (least.details, least.sampling.max_tokens, least.length_field) == (NO_DETAILS, None, "max_output_tokens")


def test_every_field_arrives() -> None:
    request = asked(
        instructions="Be brief.", max_output_tokens=9, temperature=0, top_p=0.5, top_logprobs=3, stream=True,
        tools=[TOOL], tool_choice={"type": "function", "name": "f"}, text={"format": SCHEMA}, user="u",
        reasoning={"effort": "low"}, metadata={"a": "b"}, service_tier="flex", truncation="auto",
    )  # fmt: skip
    system, hi = request.conversation.messages
    assert (system, hi["role"]) == ({"role": "system", "content": "Be brief."}, "user")
    assert request.sampling.max_tokens == 9 and request.stream and request.truncates
    assert request.sampling.grammar is not None and request.sampling.grammar.kind is GrammarKind.JSON_SCHEMA
    assert request.grammar_field == "text.format.schema"
    assert request.conversation.variables == {"reasoning_effort": "low"}
    assert request.conversation.tools is not None and request.conversation.tools.choice == "required"
    assert request.details == TokenDetails(3)
    echoed = json.loads(orjson.dumps(request.echoed))
    assert echoed["tools"] == [{"strict": False, **TOOL}] and echoed["text"] == {"format": SCHEMA}
    assert (echoed["instructions"], echoed["metadata"], echoed["tool_choice"]["name"]) == ("Be brief.", {"a": "b"}, "f")


def test_log_probabilities_are_asked_for_by_name_or_number() -> None:
    assert asked(include=[LOGPROBS]).details == asked(top_logprobs=0).details == TokenDetails(0)
    assert asked(include=[LOGPROBS], top_logprobs=2).details == TokenDetails(2)


def test_tools_and_includes_of_a_server_are_ignored_and_told() -> None:
    request = asked(tools=[*HOSTED, TOOL], include=[ENCRYPTED, "file_search_call.results"], mood="good")
    assert request.ignored is not None
    assert [*request.ignored] == [
        "mood",
        "include[].file_search_call.results",
        "tools[].web_search",
        "tools[].file_search",
    ]
    assert request.conversation.tools is not None and len(request.conversation.tools.definitions) == 1
    assert asked(tools=HOSTED).conversation.tools is None
    assert refused(REFUSES, tools=HOSTED).param == "tools[0].type"
    assert refused(REFUSES, include=["x"]).param == "include[0]"
    assert asked(REFUSES, include=[ENCRYPTED]).ignored is None


DEEP: Any = {}
for _ in range(200):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"model": None}, "model", "must be a string, got null"),
        ({"max_output_tokens": 0}, "max_output_tokens", "at least 1"),
        ({"max_tokens": 5}, "max_tokens", "send max_output_tokens instead"),
        ({"max_new_tokens": 5}, "max_new_tokens", "send max_output_tokens instead"),
        ({"messages": [{}]}, "messages", "send input instead"),
        ({"system": "x"}, "system", "send instructions instead"),
        ({"response_format": {"type": "text"}}, "response_format", "send text.format instead"),
        ({"guided_json": {"a": 1}}, "guided_json", "send text.format instead"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "send reasoning.effort instead"),
        ({"n": 2}, "n", "is not supported here"),
        ({"background": True, "store": False}, "store", "background needs store"),
        ({"conversation": {"id": 7}}, "conversation", "must be a string"),
        ({"conversation": "c", "previous_response_id": "r"}, "previous_response_id", "exclude each other"),
        ({"prompt": {"id": "x"}}, "prompt", "is not supported here"),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", "'json_schema'"),
        ({"text": {"format": {**SCHEMA, "schema": 5}}}, "text.format.schema", "must be a JSON schema"),
        ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format.schema", "cannot be combined with"),
        ({"text": {"format": {**SCHEMA, "json_schema": SCHEMA}}}, "text.format.json_schema", "schema instead"),
        ({"text": {"format": {**STRICT, "schema": {"not": {"type": "null"}}}}}, "text.format.schema", "#/not"),
        ({"include": "x"}, "include", "must be an array"),
        ({"include": ["x"] * 33}, "include", "at most 32 items"),
        ({"top_logprobs": 21}, "top_logprobs", "at most 20"),
        ({"truncation": "x"}, "truncation", "'auto' or 'disabled'"),
        ({"metadata": {"a": 5}}, "metadata.a", "must be a string"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata", "at most 16 items"),
        ({"tools": [5]}, "tools[0]", "must be an object"),
        ({"tools": [{"type": None}]}, "tools[0].type", "the tools that clients run, got null"),
        ({"tools": [{"type": "function"}]}, "tools[0].name", "is required"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name", "the name of another tool too"),
        ({"tool_choice": "required"}, "tool_choice", "that the client runs"),
        ({"tools": HOSTED, "tool_choice": {"type": "web_search"}}, "tool_choice", "that the client runs"),
        ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", "with the name of a function"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "g"}}, "tool_choice.name", "one of the tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [TOOL], "x": DEEP}},
            "tool_choice",
            "nested in more than 100 levels",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_a_wrong_field_is_refused_by_the_names_of_this_api(fields: Any, param: str, message: str) -> None:
    error = refused(**fields)
    assert error.param == param and message in error.message


def test_a_tool_of_any_content_is_repeated() -> None:
    deep: Any = {}
    for _ in range(245):
        deep = {"a": deep}
    echoed = asked(tools=[{**TOOL, "parameters": deep, "mood": DEEP}]).echoed
    assert "mood" not in json.loads(orjson.dumps({"response": {**echoed}}))["response"]["tools"][0]
