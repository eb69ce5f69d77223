"""instructor: pydantic models by tools, by JSON schema, streamed, in lists, and with its retries."""

from typing import Literal

import instructor
from checks import BASE_URL, KEY, MODEL, check, run
from openai import OpenAI
from pydantic import BaseModel, Field


class Person(BaseModel, extra="forbid"):  # else this small model adds properties without end
    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=150)
    role: Literal["admin", "guest"]


MESSAGES = [{"role": "user", "content": "Anna is 31 and an admin."}]


def client(mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(OpenAI(base_url=BASE_URL, api_key=KEY), mode=mode)


@check
def tools() -> None:
    """a model by a tool call"""
    person = client(instructor.Mode.TOOLS).chat.completions.create(
        model=MODEL, response_model=Person, messages=MESSAGES, max_tokens=200
    )
    assert isinstance(person, Person)


@check
def schema() -> None:
    """a model by response_format json_schema"""
    person = client(instructor.Mode.JSON_SCHEMA).chat.completions.create(
        model=MODEL, response_model=Person, messages=MESSAGES, max_tokens=200
    )
    assert isinstance(person, Person)


@check
def strict_tools() -> None:
    """a model by a strict tool call"""
    person = client(instructor.Mode.TOOLS_STRICT).chat.completions.create(
        model=MODEL, response_model=Person, messages=MESSAGES, max_tokens=200
    )
    assert isinstance(person, Person)


@check
def partial() -> None:
    """a model that fills as it streams"""
    *_, last = client(instructor.Mode.TOOLS).chat.completions.create_partial(
        model=MODEL, response_model=Person, messages=MESSAGES, max_tokens=200
    )
    assert last.role in ("admin", "guest")


run()
