"""openai for Python: its own examples of tools, parse, streams, log probabilities and responses."""

import json

import openai
from checks import ASK, BASE_URL, KEY, MODEL, check, run
from openai import OpenAI
from pydantic import BaseModel, Field

client = OpenAI(base_url=BASE_URL, api_key=KEY)


class GetWeather(BaseModel):
    """Tells the weather in a city."""

    city: str = Field(max_length=20)


class Step(BaseModel):
    explanation: str = Field(max_length=20)
    output: str = Field(max_length=20)


class Solution(BaseModel):
    steps: list[Step] = Field(min_length=1, max_length=2)
    final_answer: int = Field(ge=0, le=999)


TOOL = openai.pydantic_function_tool(GetWeather, name="get_weather")
MESSAGES = [{"role": "user", "content": ASK}]


@check
def conversation() -> None:
    """a strict tool call, its result, and the answer"""
    messages = list(MESSAGES)
    message = (
        client.chat.completions.parse(model=MODEL, messages=messages, tools=[TOOL], temperature=0).choices[0].message
    )
    (call,) = message.tool_calls
    assert call.function.parsed_arguments == GetWeather(city="Paris")
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "sunny"}]
    answer = client.chat.completions.create(model=MODEL, messages=messages, tools=[TOOL], temperature=0)
    assert "sunny" in answer.choices[0].message.content


@check
def streamed() -> None:
    """a tool call's arguments as they stream"""
    with client.chat.completions.stream(model=MODEL, messages=MESSAGES, tools=[TOOL], temperature=0) as stream:
        deltas = [event.arguments_delta for event in stream if event.type == "tool_calls.function.arguments.delta"]
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert json.loads("".join(deltas)) == json.loads(call.function.arguments) == {"city": "Paris"}


@check
def named() -> None:
    """a function that must be called"""
    choice = {"type": "function", "function": {"name": "get_weather"}}
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello!"}], tools=[TOOL], tool_choice=choice, max_tokens=200
    )
    GetWeather.model_validate_json(answer.choices[0].message.tool_calls[0].function.arguments)


@check
def parsed() -> None:
    """a nested pydantic model as the response format"""
    answer = client.chat.completions.parse(
        model=MODEL, messages=[{"role": "user", "content": "8x + 7 = -23"}], response_format=Solution, max_tokens=400
    )
    assert isinstance(answer.choices[0].message.parsed, Solution)


@check
def cut() -> None:
    """a structured answer that its length cuts, as the client's own error"""
    try:
        client.chat.completions.parse(model=MODEL, messages=MESSAGES, response_format=Solution, max_tokens=3)
    except openai.LengthFinishReasonError:
        return
    raise AssertionError("it was not cut")


@check
def choices() -> None:
    """three answers with log probabilities"""
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, n=3, logprobs=True, top_logprobs=3, max_tokens=8, seed=1
    )
    assert len(answer.choices) == 3
    assert all(len(token.top_logprobs) == 3 for choice in answer.choices for token in choice.logprobs.content)


@check
def response_conversation() -> None:
    """a response that calls a tool, its result, and the answer"""
    turns = list(MESSAGES)
    tool = {"type": "function", "name": "get_weather", "parameters": GetWeather.model_json_schema(), "strict": False}
    first = client.responses.create(model=MODEL, input=turns, tools=[tool], temperature=0)
    (call,) = first.output
    assert json.loads(call.arguments) == {"city": "Paris"}
    turns += [*first.output, {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}]
    assert "sunny" in client.responses.create(model=MODEL, input=turns, tools=[tool], temperature=0).output_text


@check
def response_streamed() -> None:
    """a response as it streams"""
    with client.responses.stream(model=MODEL, input="Count from 3 to 6.", temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == stream.get_final_response().output_text == "3, 4, 5, 6"


@check
def response_parsed() -> None:
    """a nested pydantic model as the format of a response"""
    answer = client.responses.parse(model=MODEL, input="8x + 7 = -23", text_format=Solution, max_output_tokens=400)
    assert isinstance(answer.output_parsed, Solution)


@check
def refused() -> None:
    """a schema that cannot be enforced, refused by its place"""
    schema = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    message = ""
    try:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, response_format=form)
    except openai.BadRequestError as error:
        message = error.message
    assert "/properties/a" in message, message


run()
