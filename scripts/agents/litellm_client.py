"""litellm: tool calls, JSON schemas and streams by its providers for OpenAI's API and for Anthropic's."""

import json

import litellm
from checks import ASK, BASE_URL, KEY, MODEL, check, run
from pydantic import BaseModel, Field

COMMON = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY, "temperature": 0, "max_tokens": 200}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather in a city.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]


class City(BaseModel, extra="forbid"):  # else this small model adds properties without end
    name: str = Field(max_length=12)
    million_people: int = Field(ge=0, le=99)


@check
def call() -> None:
    """a tool call"""
    answer = litellm.completion(messages=[{"role": "user", "content": ASK}], tools=TOOLS, **COMMON)
    (found,) = answer.choices[0].message.tool_calls
    assert (found.function.name, json.loads(found.function.arguments)) == ("get_weather", {"city": "Paris"})


@check
def streamed() -> None:
    """a tool call put together from its stream"""
    ask = [{"role": "user", "content": ASK}]
    chunks = list(litellm.completion(messages=ask, tools=TOOLS, tool_choice="required", stream=True, **COMMON))
    answer = litellm.stream_chunk_builder(chunks, messages=ask)
    assert answer.choices[0].message.tool_calls[0].function.name == "get_weather"


@check
def schema() -> None:
    """a pydantic model as the response format"""
    answer = litellm.completion(messages=[{"role": "user", "content": "Paris"}], response_format=City, **COMMON)
    City.model_validate_json(answer.choices[0].message.content)


@check
def anthropics() -> None:
    """a tool call by Anthropic's route, and the same as it streams"""
    common = COMMON | {"model": f"anthropic/{MODEL}", "api_base": BASE_URL.removesuffix("/v1")}
    ask = [{"role": "user", "content": ASK}]
    answer = litellm.completion(messages=ask, tools=TOOLS, **common)
    chunks = list(litellm.completion(messages=ask, tools=TOOLS, stream=True, **common))
    for one in (answer, litellm.stream_chunk_builder(chunks, messages=ask)):
        (found,) = one.choices[0].message.tool_calls
        assert (found.function.name, json.loads(found.function.arguments)) == ("get_weather", {"city": "Paris"})
        assert one.usage.prompt_tokens > 5


run()
