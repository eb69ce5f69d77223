"""Anthropic's client: a stream, a tool and its result, a count of tokens."""

import os

from anthropic import Anthropic

MODEL = os.environ.get("SLUICE_MODEL", "embedded")
TOOL = {
    "name": "get_weather",
    "description": "Tells the weather in a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}

client = Anthropic()  # reads ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY
count = [{"role": "user", "content": "Count from 3 to 12."}]
with client.messages.stream(model=MODEL, max_tokens=100, messages=count) as stream:
    for text in stream.text_stream:
        print(text, end="", flush=True)
print()

messages = [{"role": "user", "content": "What is the weather in Oslo?"}]
print(client.messages.count_tokens(model=MODEL, messages=messages, tools=[TOOL]).input_tokens, "tokens")
reply = client.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=[TOOL])
while reply.stop_reason == "tool_use":
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": f"sunny in {block.input.get('city')}"}
        for block in reply.content
        if block.type == "tool_use"
    ]
    messages += [{"role": "assistant", "content": reply.content}, {"role": "user", "content": results}]
    reply = client.messages.create(model=MODEL, max_tokens=200, messages=messages, tools=[TOOL])
print(reply.content[0].text)
