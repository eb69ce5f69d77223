"""The bodies of /v1/messages and /v1/messages/count_tokens."""

from typing import Any

import orjson
import pytest

from gateway.anthropic.message_request import MessagesBody, parse_count_request, parse_message_request
from gateway.errors import BadRequest
from gateway.http.json_body import JsonBody
from gateway.openai.limits import Limits
from gateway.openai.messages import Message
from gateway.openai.requests import ChatRequest

IGNORES = Limits(vocab_size=1000, max_model_len=4096)
REFUSES = Limits(vocab_size=1000, max_model_len=4096, unknown_fields="refuse")
HI: dict[str, Any] = {"role": "user", "content": "Hi"}
CACHED = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {"n": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": "2"}
TOOL: dict[str, Any] = {"name": "f", "input_schema": {"type": "object"}}
SEARCH = {"type": "web_search_20250305", "name": "web_search"}
CALLED: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"n": 1}}, "id": "a"}],
}
TOLD: Message = {"role": "tool", "content": "2", "tool_call_id": "a"}


def asked(*messages: Any, limits: Limits = IGNORES, **fields: Any) -> ChatRequest:
    body = {"model": "m", "max_tokens": 9, "messages": messages or [HI], **fields}
    return parse_message_request(JsonBody(orjson.dumps(body)), limits)


def refused(*messages: Any, limits: Limits = IGNORES, **fields: Any) -> BadRequest:
    with pytest.raises(BadRequest) as refusal:
        asked(*messages, limits=limits, **fields)
    assert refusal.value.message.endswith(".")
    return refusal.value


def text(content: str, **others: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **others}


def user(*blocks: Any) -> dict[str, Any]:
    return {"role": "user", "content": [*blocks]}


def assistant(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": [*blocks]}


THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "x"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([HI], [HI]),
        ([user(text("H", **CACHED), text("i", citations=[1]))], [HI]),
        ([user()], [{"role": "user", "content": ""}]),
        ([HI, assistant(USE), user(RESULT)], [HI, CALLED, {**TOLD, "name": "f"}]),
        ([user({**RESULT, "is_error": True}, text("H"), text("i"))], [TOLD, HI]),
        ([user(text("Hi"), {**RESULT, "content": [text("2")]}, text("Hi"))], [HI, TOLD, HI]),
        ([user({"type": "tool_result", "tool_use_id": "a"})], [{**TOLD, "content": ""}]),
        (
            [assistant(THOUGHT, text("W"), text("ell"), {**USE, "caller": {"type": "direct"}}), HI],
            [{**CALLED, "content": "Well", "reasoning_content": "hm"}, HI],
        ),
        ([assistant({"type": "redacted_thinking", "data": "x"}, text("Hi")), HI], [{**HI, "role": "assistant"}, HI]),
        ([{"role": "system", "content": "Hi"}, HI], [{"role": "system", "content": "Hi"}, HI]),
    ],
)
def test_blocks_are_messages(given: Any, expected: list[Message]) -> None:
    request = asked(*given, limits=REFUSES)
    assert [*request.conversation.messages] == expected
    assert request.conversation.add_generation_prompt
    assert request.ignored is None


def test_a_last_message_of_the_assistant_goes_on_if_it_has_begun() -> None:
    begun = asked(HI, assistant(text("3, 4"))).conversation
    assert (begun.continue_final_message, begun.add_generation_prompt) == (True, False)
    for empty in ("", [], [text("")]):
        conversation = asked(HI, {"role": "assistant", "content": empty}).conversation
        assert ([*conversation.messages], conversation.continue_final_message) == ([HI], False)
    assert not asked(HI, assistant(USE)).conversation.continue_final_message


def test_every_field_arrives() -> None:
    request = asked(
        system=[text("Be ", **CACHED), text("brief.")], stream=True, temperature=0.5, top_p=0.5, top_k=3, seed=7,
        stop_sequences=["a", ""], metadata={"user_id": "u"}, service_tier="standard_only", tools=[{**TOOL, **CACHED}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
        thinking={"type": "enabled", "budget_tokens": 5},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "integer"}}},
    )  # fmt: skip
    sampling, conversation = request.sampling, request.conversation
    assert conversation.messages[0] == {"role": "system", "content": "Be brief."}
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (9, 0.5, 0.5, 3)
    assert (sampling.seed, sampling.stop, request.service_tier) == (7, ("a",), "default")
    assert (request.grammar_field, request.thinking_budget) == ("output_config.format.schema", 5)
    assert conversation.tools is not None
    assert (conversation.tools.choice, conversation.tools.is_single) == ("required", True)
    assert conversation.variables == {"reasoning_effort": "low"} and request.shows_reasoning
    beta = asked(output_format={"type": "json_schema", "schema": {"type": "integer"}})
    assert (beta.sampling.grammar, beta.grammar_field) == (sampling.grammar, "output_format.schema")


def test_it_thinks_only_if_it_is_told_to() -> None:
    for thinking in (None, {"type": "disabled", "budget_tokens": 5}):
        request = asked(thinking=thinking, output_config={"effort": "high"})
        assert request.conversation.variables == {"reasoning_effort": "none"}
        assert (request.shows_reasoning, request.thinking_budget) == (False, None)
    assert asked(thinking={"type": "adaptive"}).shows_reasoning
    assert not asked(thinking={"type": "enabled", "display": "omitted"}).shows_reasoning


def test_the_least_request_and_one_of_nulls_are_the_same() -> None:
    names = MessagesBody.__annotations__.keys() - {"model", "max_tokens", "messages"}
    assert asked(limits=REFUSES, **dict.fromkeys(names)) == asked()


@pytest.mark.parametrize(
    ("messages", "fields", "seconds"),
    [
        ([HI], {}, None),
        ([HI], {"cache_control": {"type": "ephemeral"}}, 300.0),
        ([user(text("Hi", **CACHED))], {"cache_control": {"type": "ephemeral", "ttl": "5m"}}, 3600.0),
        ([user(RESULT | CACHED)], {}, 3600.0),
        ([HI], {"system": [text("Be brief.", **CACHED)]}, 3600.0),
        ([HI], {"tools": [TOOL | {"cache_control": {"type": "ephemeral"}}]}, 300.0),
        ([user(text("Hi", cache_control=None))], {}, None),
        ([HI], {"tools": [{"name": "f", "input_schema": {"properties": {"cache_control": {"type": "string"}}}}]}, None),
        ([{"role": "user", "content": '"cache_control": {"type": "ephemeral", "ttl": "1h"}'}], {}, None),
    ],
)
def test_a_mark_for_caches_says_for_how_long_a_prompt_is_wanted(
    messages: list[Any], fields: dict[str, Any], seconds: float | None
) -> None:
    request = asked(*messages, limits=REFUSES, **fields)
    assert request.cached_for == seconds


def test_server_tools_and_unknown_fields_are_ignored_and_told() -> None:
    request = asked({**user({**text("Hi"), "mood": 1}), "mood": 1}, tools=[SEARCH, TOOL], container="x", mood=1)
    assert request.ignored is not None
    assert {*request.ignored} == {
        "container", "mood", "messages[].mood", "messages[].content[].mood", "tools[].web_search_20250305"
    }  # fmt: skip
    assert request.conversation.tools is not None and len(request.conversation.tools.definitions) == 1
    for fields, param in (
        ({"tools": [SEARCH]}, "tools[0].type"),
        ({"mood": 1}, "mood"),
        ({"container": "x"}, "container"),
    ):
        assert refused(limits=REFUSES, **fields).param == param


def test_a_count_reads_what_a_request_reads_of_its_prompt() -> None:
    fields: dict[str, Any] = {"system": "Be brief.", "tools": [TOOL], "messages": [HI, assistant(USE), user(RESULT)]}
    raw = JsonBody(orjson.dumps({"model": "m", "max_tokens": 9, "temperature": 0, **fields}))
    model, conversation, ignored = parse_count_request(raw, IGNORES)
    assert (model, conversation) == ("m", asked(**fields).conversation)
    assert ignored is not None and [*ignored] == ["max_tokens", "temperature"]


FIRST = "messages[0].content[0]"
DEEP: Any = {}
for _ in range(101):
    DEEP = {"a": DEEP}


@pytest.mark.parametrize(
    ("messages", "fields", "param", "message"),
    [
        ((), {"max_tokens": None}, "max_tokens", "must be an integer, got null"),
        ((), {"messages": []}, "messages", "at least 1 item"),
        ((), {"messages": [HI] * 2049}, "messages", "at most 2048 items"),
        (({"role": "tool", "content": "x"},), {}, "messages[0].role", "'user', 'assistant' or 'system'"),
        (({"role": "user"},), {}, "messages[0].content", "is required"),
        (({"role": "user", "content": 5},), {}, "messages[0].content", "an array of at most 192 blocks, got 5"),
        ((user(*[text("x")] * 193),), {}, "messages[0].content", "got an array of 193"),
        ((user(5),), {}, "messages[0].content[0]", "text, tool_result, got 5"),
        ((user({"type": "image", "source": {}}),), {}, "messages[0].content[0].type", "got 'image'"),
        ((user({"type": "text"}),), {}, "messages[0].content[0].text", "is required"),
        ((user(USE),), {}, "messages[0].content[0].type", "got 'tool_use'"),
        ((user({"type": "tool_result"}),), {}, "messages[0].content[0].tool_use_id", "is required"),
        ((user({**RESULT, "content": [{"type": "image"}]}),), {}, f"{FIRST}.content[0].type", "reads texts"),
        ((assistant({**USE, "id": ""}),), {}, "messages[0].content[0].id", "at least 1 character"),
        ((assistant({**USE, "input": DEEP}),), {}, "messages[0].content[0].input", "nested in more than 100 levels"),
        ((), {"system": [{"type": "image"}]}, "system[0].type", "reads texts"),
        ((), {"stop_sequences": ["x" * 1025]}, "stop_sequences[0]", "at most 1024 characters"),
        ((), {"stop_sequences": ["x"] * 65}, "stop_sequences", "at most 64 items"),
        ((), {"stop": ["x"]}, "stop", "send stop_sequences instead"),
        ((), {"max_completion_tokens": 5}, "max_completion_tokens", "send max_tokens instead"),
        ((), {"response_format": {"type": "text"}}, "response_format", "send output_config.format instead"),
        ((), {"guided_json": {"a": 1}}, "guided_json", "send output_config.format instead"),
        ((), {"instructions": "x"}, "instructions", "send system instead"),
        ((), {"mcp_servers": [{"url": "x"}]}, "mcp_servers", "is not supported here"),
        ((), {"tools": [{"name": "f"}]}, "tools[0].input_schema", "is required"),
        ((), {"tools": [{**TOOL, "name": "a b"}]}, "tools[0].name", "pattern"),
        ((), {"tools": [TOOL, TOOL]}, "tools[1].name", "the name of another tool too"),
        ((), {"tools": [{"type": 5}]}, "tools[0].type", "the tools that clients run, got 5"),
        ((), {"tool_choice": {"type": "any"}}, "tool_choice", "that the client runs"),
        ((), {"tools": [SEARCH], "tool_choice": {"type": "tool", "name": "web_search"}}, "tool_choice", "client runs"),
        ((), {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice.name", "one of the tools"),
        ((), {"tools": [TOOL], "tool_choice": "auto"}, "tool_choice", 'must be {"type": "auto"}'),
        ((), {"tool_choice": {"type": "auto", "disable_parallel_tool_use": 5}}, "tool_choice", "got an object"),
        ((), {"thinking": {"type": "enabled", "budget_tokens": 2**25}}, "thinking.budget_tokens", "at most 16777216"),
        ((), {"output_format": {"type": "json_schema", "schema": 5}}, "output_format.schema", "must be a JSON schema"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_refused_by_the_names_of_this_api(
    messages: Any, fields: Any, param: str, message: str
) -> None:
    error = refused(*messages, **fields)
    assert error.param == param and message in error.message, error.message
