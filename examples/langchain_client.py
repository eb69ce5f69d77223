"""LangChain: a chain that streams, and a model that calls a tool."""

import os

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

model = ChatOpenAI(
    model=os.environ.get("SLUICE_MODEL", "embedded"),
    base_url=os.environ["OPENAI_BASE_URL"],
    temperature=0,
    max_completion_tokens=200,
)


@tool
def get_weather(city: str) -> str:
    """Tells the weather in a city."""
    return f"sunny in {city}"


def main() -> None:
    chain = ChatPromptTemplate.from_template("Count from {first} to {last}.") | model | StrOutputParser()
    for piece in chain.stream({"first": 3, "last": 12}):
        print(piece, end="", flush=True)
    print()
    for call in model.bind_tools([get_weather]).invoke("What is the weather in Oslo?").tool_calls:
        print(get_weather.invoke(call).content)


if __name__ == "__main__":
    main()
