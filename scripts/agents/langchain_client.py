"""langchain-openai: bound tools, structured output by schema and by function, streams, log probabilities,
embeddings.
"""

from checks import ASK, BASE_URL, EMBEDDING_MODEL, KEY, MODEL, check, check_vectors, run
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings
from pydantic import BaseModel, Field

chat = ChatOpenAI(model=MODEL, base_url=BASE_URL, api_key=KEY, temperature=0, max_tokens=200)


@tool
def get_weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"sunny in {city}"


class City(BaseModel, extra="forbid"):  # else this small model adds properties without end
    """A city."""

    name: str = Field(max_length=12)
    million_people: int = Field(ge=0, le=99)


@check
def bound() -> None:
    """a bound tool, its result, and the answer"""
    bound_chat = chat.bind_tools([get_weather])
    messages = [HumanMessage(ASK)]
    answer = bound_chat.invoke(messages)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"}), call
    messages += [answer, ToolMessage(get_weather.invoke(call["args"]), tool_call_id=call["id"])]
    assert "sunny" in bound_chat.invoke(messages).content


@check
def streamed_call() -> None:
    """a tool call put together from its stream"""
    whole = None
    for chunk in chat.bind_tools([get_weather], tool_choice="required").stream([HumanMessage(ASK)]):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None
    assert whole.tool_calls[0]["name"] == "get_weather", whole


@check
def by_schema() -> None:
    """structured output by json_schema"""
    assert isinstance(chat.with_structured_output(City, method="json_schema").invoke("Paris"), City)


@check
def by_function() -> None:
    """structured output by function calling"""
    assert isinstance(chat.with_structured_output(City, method="function_calling").invoke("Paris"), City)


@check
def logprobs() -> None:
    """log probabilities in the metadata of an answer"""
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke("Count from 3 to 6.")
    assert len(answer.response_metadata["logprobs"]["content"]) > 3


@check
def embeddings() -> None:
    """embeddings of a query and of documents"""
    # else texts are sent as token ids of OpenAI's models
    model = OpenAIEmbeddings(model=EMBEDDING_MODEL, base_url=BASE_URL, api_key=KEY, check_embedding_ctx_length=False)
    check_vectors(model.embed_query, model.embed_documents)


run()
