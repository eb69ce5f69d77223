"""pydantic-ai: an agent that calls a function, and one whose output is a model, native and by tools."""

from checks import ASK, BASE_URL, KEY, MODEL, check, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))


class City(BaseModel, extra="forbid"):  # else this small model adds properties without end
    name: str = Field(max_length=12)
    million_people: int = Field(ge=0, le=99)


@check
def function() -> None:
    """a function that the model calls, and an answer after it"""
    asked = []
    agent = Agent(model)

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """Tells the weather in a city."""
        asked.append(city)
        return "sunny"

    answer = agent.run_sync(ASK, model_settings={"temperature": 0, "max_tokens": 200}).output
    assert asked == ["Paris"], asked
    assert "sunny" in answer, answer


@check
def native() -> None:
    """an output type by json_schema"""
    agent = Agent(model, output_type=NativeOutput(City))
    assert isinstance(agent.run_sync("Paris", model_settings={"max_tokens": 200}).output, City)


@check
def by_tool() -> None:
    """an output type by a tool that must be called"""
    agent = Agent(model, output_type=ToolOutput(City))
    assert isinstance(agent.run_sync("Paris", model_settings={"max_tokens": 200}).output, City)


@check
def streamed() -> None:
    """an answer as it streams"""
    agent = Agent(model)
    with_text = agent.run_stream_sync("Count from 3 to 6.", model_settings={"temperature": 0})
    assert "".join(with_text.stream_text(delta=True)) == "3, 4, 5, 6"


run()
