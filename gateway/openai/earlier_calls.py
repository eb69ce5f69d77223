"""The calls of earlier turns as a chat template takes them.

Clients send back answers of this server's model or another's: arguments that are no JSON, several calls at once, ids of
another length. No template takes all of these, and a refused message would end its conversation.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any

import orjson

from backend.text.tokenizer import Tokenizer
from gateway.openai.messages import Message


def forms_of(messages: Sequence[Message], tokenizer: Tokenizer) -> Iterator[Sequence[Message]]:
    """Yields the messages unchanged, and then other forms that a template may accept."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    if not calls:
        yield messages
        return
    id_length = tokenizer.chat_template.call_id_length
    if id_length is not None:
        messages = _with_ids(messages, id_length)
    yield messages
    is_malformed = any(isinstance(call["function"]["arguments"], str) for call in calls)
    arguments = [_as_objects, _as_texts] if is_malformed else [_as_texts]
    apart = _one_by_one(messages)
    if len(apart) > len(messages):
        yield apart
    for form in arguments:
        yield _with_arguments(messages, form)
        if len(apart) > len(messages):
            yield _with_arguments(apart, form)


def _as_objects(arguments: Any) -> Any:
    return {} if isinstance(arguments, str) else arguments


def _as_texts(arguments: Any) -> Any:
    """Arguments as a model wrote them, for templates like DeepSeek's."""
    return arguments if isinstance(arguments, str) else orjson.dumps(arguments).decode()


def _with_arguments(messages: Sequence[Message], form: Callable[[Any], Any]) -> list[Message]:
    def changed(call: Message) -> Message:
        function = call["function"]
        return {**call, "function": {**function, "arguments": form(function["arguments"])}}

    return [_with_calls(message, changed) for message in messages]


def _with_ids(messages: Sequence[Message], length: int) -> list[Message]:
    """The messages with call ids of `length` letters and digits, for templates that demand it."""

    def fitting(call_id: str) -> str:
        fits = len(call_id) == length and call_id.isascii() and call_id.isalnum()
        return call_id if fits else sha256(call_id.encode()).hexdigest()[:length]

    named = [_with_calls(message, lambda call: {**call, "id": fitting(call.get("id", ""))}) for message in messages]
    return [
        {**message, "tool_call_id": fitting(message["tool_call_id"])} if "tool_call_id" in message else message
        for message in named
    ]


def _with_calls(message: Message, change: Callable[[Message], Message]) -> Message:
    calls = message.get("tool_calls")
    return message if calls is None else {**message, "tool_calls": [change(call) for call in calls]}


def _one_by_one(messages: Sequence[Message]) -> list[Message]:
    """Returns the messages with at most one call each, followed by its result."""
    apart, index = list[Message](), 0
    while index < len(messages):
        message, index = messages[index], index + 1
        calls = message.get("tool_calls", ())
        if len(calls) < 2:
            apart.append(message)
            continue
        results = list[Message]()
        while index < len(messages) and messages[index]["role"] == "tool":
            results.append(messages[index])
            index += 1
        for number, call in enumerate(calls):
            apart.append({**(message if number == 0 else {"role": "assistant", "content": ""}), "tool_calls": [call]})
            apart += [result for result in results if result["tool_call_id"] == call.get("id")]
        ids = {call.get("id") for call in calls}
        apart += [result for result in results if result["tool_call_id"] not in ids]
    return apart
