"""Anthropic's package for Python: messages whole and streamed, tools and their results, thinking, counts, errors."""

import anthropic
from checks import ASK, MODEL, check, run

client = anthropic.Anthropic()  # reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
CACHED = {"cache_control": {"type": "ephemeral"}}
TOOL = {
    "name": "get_weather",
    "description": "Tells the weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
FIELDS = {"model": MODEL, "max_tokens": 200, "extra_body": {"temperature": 0}}
COUNT = [{"role": "user", "content": "Count from 3 to 6."}]


@check
def conversation() -> None:
    """a tool, its result, and the answer"""
    messages = [{"role": "user", "content": ASK}]
    tools = [TOOL | CACHED, {"type": "web_search_20250305", "name": "web_search"}]
    first = client.messages.create(messages=messages, tools=tools, **FIELDS)
    (use,) = [block for block in first.content if block.type == "tool_use"]
    assert (use.input, first.stop_reason) == ({"city": "Paris"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "sunny"}]}
    messages += [{"role": "assistant", "content": first.content}, {"role": "user", "content": [result]}]
    answer = client.messages.create(messages=messages, tools=tools, **FIELDS)
    assert "sunny" in answer.content[0].text


@check
def streamed() -> None:
    """a message and its usage as they stream"""
    system = [{"type": "text", "text": "Be brief.", **CACHED}]
    with client.messages.stream(messages=COUNT, system=system, **FIELDS) as stream:
        text, message = "".join(stream.text_stream), stream.get_final_message()
    assert text == message.content[0].text == "3, 4, 5, 6"
    usage = message.usage
    assert usage.input_tokens + usage.cache_read_input_tokens > 5 and usage.output_tokens > 3


@check
def streamed_tool() -> None:
    """a tool as it streams, with thinking that this model does not have"""
    thinking, asked = {"type": "enabled", "budget_tokens": 100}, [{"role": "user", "content": ASK}]
    with client.messages.stream(messages=asked, tools=[TOOL], thinking=thinking, **FIELDS) as stream:
        (use,) = [block for block in stream.get_final_message().content if block.type == "tool_use"]
    assert use.input == {"city": "Paris"}


@check
def stopped() -> None:
    """a stop sequence, and an answer that goes on with a prefill"""
    message = client.messages.create(messages=COUNT, stop_sequences=["5"], **FIELDS)
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "5")
    begun = [*COUNT, {"role": "assistant", "content": "3, 4"}]
    assert client.messages.create(messages=begun, **FIELDS).content[0].text == ", 5, 6"


@check
def counted() -> None:
    """a count of tokens, which is the usage of the prompt"""
    usage = client.messages.create(messages=COUNT, tools=[TOOL], **FIELDS).usage
    told = client.messages.count_tokens(model=MODEL, messages=COUNT, tools=[TOOL]).input_tokens
    assert told == usage.input_tokens + usage.cache_read_input_tokens


@check
def refused() -> None:
    """errors of its own types"""
    stranger = anthropic.Anthropic(api_key="sk-wrong", max_retries=0)
    for asked, changes, kind in (
        (client, {"model": "none"}, anthropic.NotFoundError),
        (client, {"max_tokens": 0}, anthropic.BadRequestError),
        (stranger, {}, anthropic.AuthenticationError),
    ):
        try:
            asked.messages.create(messages=COUNT, **(FIELDS | changes))
        except kind:
            continue
        raise AssertionError(kind)


run()
