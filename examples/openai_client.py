"""OpenAI's client: a stream, an answer in the form of a class, and what is left of the key's limits."""

import os

from openai import OpenAI, RateLimitError
from pydantic import BaseModel

MODEL = os.environ.get("SLUICE_MODEL", "embedded")
client = OpenAI()  # reads OPENAI_BASE_URL and OPENAI_API_KEY


class City(BaseModel):
    name: str
    population: int


def main() -> None:
    question = [{"role": "user", "content": "Count from 3 to 12."}]
    for chunk in client.chat.completions.create(model=MODEL, messages=question, temperature=0, stream=True):
        print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()

    try:
        answer = client.chat.completions.with_raw_response.parse(
            model=MODEL,
            messages=[{"role": "user", "content": "Which city is the capital of Norway?"}],
            response_format=City,
            temperature=0,
            max_tokens=200,
        )
    except RateLimitError as error:  # a limit of the tenant's: the message names it; the client has tried again by then
        raise SystemExit(str(error)) from None
    print(type(answer.parse().choices[0].message.parsed).__name__)
    print(answer.headers.get("x-ratelimit-remaining-requests", "unlimited"), "requests left")


if __name__ == "__main__":
    main()
