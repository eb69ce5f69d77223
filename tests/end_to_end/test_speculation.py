"""Answers of a gateway that drafts are, to the official client, those of one that does not."""

from collections.abc import Iterator

import openai
import pytest
from openai.types.chat import ChatCompletion

from tests.gateway.server_process import PATIENCE, ServerProcess, running_server

REPEATING = "Once there was a small cat"  # and the end, without its end token, is told for ever
SCHEMA = {"type": "object", "properties": {"count": {"type": "integer"}}, "required": ["count"]}
FIELDS = (
    {"temperature": 0, "max_tokens": 48},
    {"temperature": 1.0, "seed": 5, "max_tokens": 48, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0, "max_tokens": 48, "stop": ["11, 12"]},
    {"max_tokens": 24, "response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": SCHEMA}}},
    {"temperature": 0.7, "seed": 6, "n": 2, "max_tokens": 24, "presence_penalty": 0.4},
)


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with running_server(tmp_path_factory.mktemp("server"), "--threads=1", "--speculate=lookup") as server:
        yield server


def answers(server: ServerProcess) -> list[object]:
    found: list[object] = []
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=PATIENCE) as client:
        for fields in FIELDS:
            asked = {"model": "embedded", "messages": [{"role": "user", "content": "Count from 3 to 12."}], **fields}
            reply: ChatCompletion = client.chat.completions.create(**asked)  # type: ignore[call-overload]
            found += [(one.message.content, one.finish_reason, one.logprobs) for one in reply.choices]
            found.append(reply.usage and reply.usage.completion_tokens)
        goes_on = {"extra_body": {"ignore_eos": True}, "temperature": 0, "stream": True}
        text = client.completions.create(model="embedded", prompt=REPEATING, max_tokens=300, **goes_on)  # type: ignore[call-overload]
        found.append("".join(chunk.choices[0].text for chunk in text if chunk.choices))
    return found


def test_answers_are_those_without_drafts(server: ServerProcess, drafting: ServerProcess) -> None:
    assert answers(drafting) == answers(server)
    drafted, accepted = (drafting.metric(f"sluice_{kind}_tokens_total") for kind in ("drafted", "accepted"))
    assert drafted >= accepted > 20
    assert server.metric("sluice_drafted_tokens_total") == 0
