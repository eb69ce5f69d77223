"""Random requests to /v1/responses and /v1/messages, and the checks of their answers.

A request begins as a valid one: a conversation of items or blocks of every type, with tools, formats and limits. Then
some of its places, anywhere, are given another value, left out, repeated, nested deeply, or get a field of another API.
A refusal has to name a place of the request.
"""

import json
import re
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

import httpx

Json = dict[str, Any]
Usage = tuple[int, int]  # tokens of input and of output

VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 20, 21, 2**31, 2**63, 10**30, 0.5, 1e308, "", "1", "auto", "none", "x" * 5000, "\x00",
    "<|end|>", [], {}, [[]], {"a": 1}, ["a"], [None], {"type": "text", "text": "Hi"}, {"type": ["x"]}, {"type": 5},
]  # fmt: skip
FOREIGN: list[str] = [
    "messages", "input", "system", "instructions", "max_tokens", "max_output_tokens", "max_completion_tokens", "n",
    "stop", "stop_sequences", "response_format", "text", "tools", "tool_calls", "tool_choice", "functions",
    "function_call", "type", "id", "name", "role", "content", "metadata", "store", "cache_control", "thinking",
    "previous_response_id", "schema", "reasoning", "reasoning_effort", "include", "stream_options", "logprobs",
    "image_url", "my_own_field",
]  # fmt: skip
TEXTS = ["Hi", "Count from 3 to 9.", "日 😀", "", "<|end|> <tool_call>", "<think>"]
SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]},
    {"type": "integer", "minimum": 1, "maximum": 9},
    {}, {"type": "strin"}, {"not": {"type": "null"}}, {"type": "string", "pattern": "("},
]  # fmt: skip
IDS = ["a", "b", "a", "call_1"]


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def text_of(random: Random, kind: str) -> Any:
    """A content: a text, or parts of this type."""
    if random.random() < 0.5:
        return random.choice(TEXTS)
    return [{"type": kind, "text": random.choice(TEXTS)} for _ in range(random.choice([0, 1, 2, 65]))]


def item(random: Random) -> Json:
    """An item of an input."""
    match random.randrange(6):
        case 0:
            return {"role": "assistant", "content": text_of(random, "output_text"), "type": "message", "id": "msg_1"}
        case 1:
            return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}
        case 2:
            return {
                "type": "function_call",
                "call_id": random.choice(IDS),
                "name": "f",
                "arguments": '{"city": "Oslo"}',
            }
        case 3:
            return {
                "type": "function_call_output",
                "call_id": random.choice(IDS),
                "output": text_of(random, "input_text"),
            }
        case 4:
            return {"role": random.choice(["system", "developer"]), "content": text_of(random, "input_text")}
    return {"role": "user", "content": text_of(random, "input_text")}


def response(random: Random) -> Json:
    tool = {"type": "function", "name": "f", "parameters": random.choice(SCHEMAS), "strict": random.random() < 0.2}
    form = {"type": "json_schema", "name": "x", "schema": random.choice(SCHEMAS), "strict": random.random() < 0.3}
    fields: Json = {
        "instructions": random.choice(TEXTS), "tools": [tool, {"type": "web_search"}],
        "temperature": random.uniform(0, 2),
        "tool_choice": random.choice(["auto", "none", "required", {"type": "function", "name": "f"}]),
        "text": {"format": random.choice([form, form, {"type": "json_object"}, {"type": "text"}])},
        "include": ["message.output_text.logprobs"], "top_logprobs": random.randrange(21), "truncation": "auto",
        "reasoning": {"effort": "low", "summary": "auto"}, "metadata": {"a": "b"}, "parallel_tool_calls": False,
    }  # fmt: skip
    items = [item(random) for _ in range(random.choice([1, 1, 2, 4, 9]))]
    return {
        "model": "embedded", "input": items if random.random() < 0.7 else random.choice(TEXTS),
        "max_output_tokens": random.randint(1, 12), **some_of(random, fields),
    }  # fmt: skip


def message(random: Random) -> Json:
    if random.random() < 0.5:
        uses = [{"type": "tool_use", "id": random.choice(IDS), "name": "f", "input": {"city": "Oslo"}}]
        blocks = [
            {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
            {"type": "text", "text": random.choice(TEXTS)}, *uses,
        ]  # fmt: skip
        return {"role": "assistant", "content": random.sample(blocks, random.randrange(4))}
    result = {"type": "tool_result", "tool_use_id": random.choice(IDS), "content": text_of(random, "text")}
    blocks = [{"type": "text", "text": random.choice(TEXTS), "cache_control": {"type": "ephemeral"}}, result]
    content = random.choice([text_of(random, "text"), random.sample(blocks, random.randrange(3))])
    return {
        "role": random.choice(["user", "user", "system"]) if isinstance(content, str) else "user",
        "content": content,
    }


def anthropic(random: Random) -> Json:
    tool = {
        "name": "f",
        "description": "Tells.",
        "input_schema": random.choice(SCHEMAS),
        "strict": random.random() < 0.2,
    }
    form = {"type": "json_schema", "schema": random.choice(SCHEMAS)}
    fields: Json = {
        "system": text_of(random, "text"), "tools": [tool, {"type": "web_search_20250305", "name": "web_search"}],
        "tool_choice": {"type": random.choice(["auto", "any", "none"]), "disable_parallel_tool_use": True},
        "stop_sequences": ["5", ""], "temperature": random.uniform(0, 1), "top_k": 5, "metadata": {"user_id": "u"},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "output_config": {"format": form, "effort": "low"},
    }  # fmt: skip
    return {
        "model": "embedded", "messages": [message(random) for _ in range(random.choice([1, 1, 2, 4, 9]))],
        "max_tokens": random.randint(1, 12), **some_of(random, fields),
    }  # fmt: skip


def some_of(random: Random, fields: Json) -> Json:
    names = random.sample([*fields], random.choice([0, 0, 1, 2, 3, 5]))
    return {name: fields[name] for name in names} | ({"stream": True} if random.random() < 0.5 else {})


def holders(value: Any) -> list[Any]:
    """The nonempty arrays and objects of a value, itself first."""
    found = [value] if isinstance(value, dict | list) and value else []
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        found += holders(inner)
    return found


def mutate(random: Random, body: Json) -> None:
    holder = random.choice(holders(body))
    key = random.choice([*holder] if isinstance(holder, dict) else range(len(holder)))
    match random.randrange(6):
        case 0:
            del holder[key]
        case 1:
            holder[key] = deep(random.choice([90, 110, 200]))
        case 2 if isinstance(holder, dict):
            holder[random.choice(FOREIGN)] = deepcopy(random.choice(VALUES))
        case 3 if isinstance(holder, list):
            holder *= random.choice([2, 70, 200, 2100]) if len(holder) < 3 else 2
        case _:
            holder[key] = deepcopy(random.choice(VALUES))


def request(random: Random) -> tuple[str, Json]:
    """Returns a path and a body, of which about half are served."""
    path, make = random.choice(PATHS)
    body = deepcopy(make(random))
    for _ in range(random.choice([0, 0, 0, 1, 1, 2, 4])):
        if body:
            mutate(random, body)
    return path, body


COUNT = "/v1/messages/count_tokens"
PATHS: list[tuple[str, Callable[[Random], Json]]] = [
    ("/v1/responses", response), ("/v1/responses", response), ("/v1/messages", anthropic), (COUNT, anthropic)
]  # fmt: skip
REQUIRED = {"model", "input", "messages", "max_tokens"}


def check_refusal(path: str, body: Json, reply: httpx.Response) -> str:
    """Returns the field of a refusal, which has to be in the request, and in no other API's words."""
    told = reply.json()
    error, param = told["error"], told["error"]["param"]
    assert (told.get("type") == "error") == path.startswith("/v1/messages"), told
    assert error["message"].endswith(".") and param is not None, error
    assert not re.search(r"pydantic|json_0|Input should|validation", error["message"]), error
    at: Any = body
    *holders_of, _ = re.findall(r"\[\d+\]|[^.\[\]]+", param) or [""]
    for step in holders_of:
        at = at[int(step[1:-1]) if step[0] == "[" else step]  # a place that the request has
    root = re.split(r"[.\[]", param)[0]
    assert root in body or root in REQUIRED, error
    return root


def judge(path: str, body: Json, reply: httpx.Response) -> Usage:
    """Returns the tokens of an answer's usage."""
    assert reply.status_code == 200, reply.text[:300]
    if path == COUNT:
        assert reply.json()["input_tokens"] > 0
        return 0, 0
    is_stream = body.get("stream") is True
    events = []
    if is_stream:
        for event in reply.text.split("\n\n")[:-1]:
            name, data = event.split("\n")
            events.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {events[-1]['type']}", event
    if path == "/v1/responses":
        return _judge_response(reply, events)
    return _judge_message(reply, events)


def _judge_response(reply: httpx.Response, events: list[Json]) -> Usage:
    whole = events[-1]["response"] if events else reply.json()
    assert whole["status"] in ("completed", "incomplete") and whole["output"], whole
    if events:
        assert [event["sequence_number"] for event in events] == [*range(len(events))]
        deltas = [event["delta"] for event in events if event["type"] == "response.output_text.delta"]
        texts = [item["content"][0]["text"] for item in whole["output"] if item["type"] == "message"]
        assert "".join(deltas) == "".join(texts)
    return whole["usage"]["input_tokens"], whole["usage"]["output_tokens"]


def _judge_message(reply: httpx.Response, events: list[Json]) -> Usage:
    if events:
        assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop"), events[-1]
        starts = [event["index"] for event in events if event["type"] == "content_block_start"]
        assert starts == [*range(len(starts))] and starts
        ended, usage = events[-2]["delta"], events[-2]["usage"]
        first = events[0]["message"]["usage"]
        assert all(first[name] == usage[name] for name in ("input_tokens", "cache_read_input_tokens"))
    else:
        ended, usage = reply.json(), reply.json()["usage"]
        assert ended["content"]
    assert ended["stop_reason"] in ("end_turn", "max_tokens", "stop_sequence", "tool_use")
    return usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
