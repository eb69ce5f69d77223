"""pydantic-ai, by chats and by its default, responses: a function that the model calls, an output type, a stream."""

from checks import ASK, BASE_URL, KEY, MODEL, check, run
from pydantic import BaseModel, Field
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

chats = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key=KEY))
MODELS = (chats, f"openai:{MODEL}")  # the latter reads OPENAI_BASE_URL and OPENAI_API_KEY


class City(BaseModel, extra="forbid"):  # else this small model adds properties without end
    name: str = Field(max_length=12)
    million_people: int = Field(ge=0, le=99)


ASKED = []


def get_weather(city: str) -> str:
    """Tells the weather in a city."""
    ASKED.append(city)
    return "sunny"


@check
def function() -> None:
    """a function that the model calls, and an answer after it"""
    for model in MODELS:
        ASKED.clear()
        agent = Agent(model, tools=[get_weather])
        answer = agent.run_sync(ASK, model_settings={"temperature": 0, "max_tokens": 200}).output
        assert ASKED == ["Paris"], ASKED
        assert "sunny" in answer, answer


@check
def native() -> None:
    """an output type by json_schema"""
    for model in MODELS:
        agent = Agent(model, output_type=NativeOutput(City))
        assert isinstance(agent.run_sync("Paris", model_settings={"max_tokens": 200}).output, City)


@check
def by_tool() -> None:
    """an output type by a tool that must be called"""
    for model in MODELS:
        agent = Agent(model, output_type=ToolOutput(City))
        assert isinstance(agent.run_sync("Paris", model_settings={"max_tokens": 200}).output, City)


@check
def streamed() -> None:
    """an answer as it streams"""
    for model in MODELS:
        with_text = Agent(model).run_stream_sync("Count from 3 to 6.", model_settings={"temperature": 0})
        assert "".join(with_text.stream_text(delta=True)) == "3, 4, 5, 6"


run()
