"""An agent: the model calls functions of this program until it has an answer."""

import json
import os
import sys

from openai import OpenAI

MODEL = os.environ.get("SLUICE_MODEL", "embedded")
MAX_TURNS = 5


def get_weather(city: str) -> str:
    return f"sunny in {city}"


FUNCTIONS = {"get_weather": get_weather}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Tells the weather in a city.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]


def answer_to(question: str) -> str:
    client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY
    messages = [{"role": "user", "content": question}]
    for _ in range(MAX_TURNS):
        reply = client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0)
        message = reply.choices[0].message
        messages.append(message)
        if not message.tool_calls:
            return message.content
        for call in message.tool_calls:
            result = FUNCTIONS[call.function.name](**json.loads(call.function.arguments))
            print(f"{call.function.name}({call.function.arguments}) = {result}")
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    raise SystemExit(f"no answer in {MAX_TURNS} turns")


if __name__ == "__main__":
    print(answer_to(" ".join(sys.argv[1:]) or "What is the weather in Oslo?"))
