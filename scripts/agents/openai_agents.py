"""openai-agents by its default, which speaks responses: a function that the model calls, an output type, a stream."""

import asyncio

from agents import Agent, ModelSettings, Runner, RunResult, function_tool, set_tracing_disabled
from checks import ASK, MODEL, check, run
from pydantic import BaseModel, Field

set_tracing_disabled(True)
LOOP = asyncio.new_event_loop()  # its client belongs to one
SETTINGS = ModelSettings(temperature=0, max_tokens=200)
ASKED = []


class City(BaseModel, extra="forbid"):  # else this small model adds properties without end
    name: str = Field(max_length=12)
    million_people: int = Field(ge=0, le=99)


@function_tool
def get_weather(city: str) -> str:
    """Tells the weather in a city."""
    ASKED.append(city)
    return "sunny"


AGENT = Agent(name="weather", instructions="Be brief.", model=MODEL, tools=[get_weather], model_settings=SETTINGS)


def run_agent(agent: Agent, asked: object) -> RunResult:
    return LOOP.run_until_complete(Runner.run(agent, asked))


@check
def function() -> None:
    """a function that the model calls, and the answer after it"""
    ASKED.clear()
    assert "sunny" in run_agent(AGENT, ASK).final_output
    assert ASKED == ["Paris"], ASKED


@check
def streamed() -> None:
    """the same as it streams"""

    async def stream() -> str:
        result = Runner.run_streamed(AGENT, ASK)
        deltas = [
            event.data.delta
            async for event in result.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert "".join(deltas) == result.final_output
        return result.final_output

    assert "sunny" in LOOP.run_until_complete(stream())


@check
def typed() -> None:
    """an output type"""
    agent = Agent(name="cities", model=MODEL, output_type=City, model_settings=SETTINGS)
    assert isinstance(run_agent(agent, "Paris").final_output, City)


@check
def turns() -> None:
    """a second turn behind the items of the first"""
    first = run_agent(AGENT, ASK)
    again = [*first.to_input_list(), {"role": "user", "content": "Count from 3 to 6."}]
    assert "3, 4, 5, 6" in run_agent(AGENT, again).final_output


run()
