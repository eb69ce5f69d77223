"""Responses that are stored: conversations go on from them, across a kill, and no tenant learns of another's."""

import signal
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.gateway.http_workers import NUMBERS_OF_WORKERS
from tests.gateway.server_process import PATIENCE, eventually
from tests.gateway.tenant_site import TenantSite, tenant_site

POLICY = """
tenants:
  acme: {}
  globex: {}
  small: {stored_responses: {bytes: 2kB}}
  none: {stored_responses: {bytes: 0B}}
"""
TOOL: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Tells the weather in a city.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
ASKED: Any = {"model": "embedded", "temperature": 0, "tools": [TOOL]}
ASK = "What is the weather in Paris?"
UNKNOWN = f"resp_{'0' * 48}"


@pytest.fixture(scope="module", params=NUMBERS_OF_WORKERS)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TenantSite]:
    folder = tmp_path_factory.mktemp("stored")
    with tenant_site(TenantSite, folder, POLICY, "--http-workers", str(request.param)) as site:
        yield site


def test_a_turn_goes_on_from_the_one_before_and_finds_its_prompt_in_the_cache(site: TenantSite) -> None:
    with site.client("acme") as client:
        first = client.responses.create(input=ASK, **ASKED)
        (call,) = first.output
        assert first.store is True and call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        second = client.responses.create(input=[result], previous_response_id=first.id, **ASKED)
        assert second.output_text == "The weather in Paris is sunny."
        assert second.usage is not None and first.usage is not None
        assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
        whole: Any = [{"role": "user", "content": ASK}, call.model_dump(), result]
        unstored = client.responses.create(input=whole, store=False, **ASKED)
        assert unstored.usage is not None and unstored.usage.input_tokens == second.usage.input_tokens
        referred: Any = [{"role": "user", "content": ASK}, {"type": "item_reference", "id": call.id}, result]
        assert client.responses.create(input=referred, **ASKED).output_text == second.output_text
        assert client.responses.retrieve(second.id) == second
        (asked,) = client.responses.input_items.list(first.id).data
        assert asked.type == "message" and asked.content[0].text == ASK  # type: ignore[union-attr]
        with client.responses.stream(input="Count from 3 to 6.", **ASKED) as stream:
            streamed = stream.get_final_response()
        assert client.responses.retrieve(streamed.id).output_text == streamed.output_text == "3, 4, 5, 6"
        client.responses.delete(first.id)
        client.responses.delete(first.id)  # a client repeats what it got no answer to
        for call_it in (
            lambda: client.responses.retrieve(first.id),
            lambda: client.responses.delete(UNKNOWN),
            lambda: client.responses.cancel(UNKNOWN),
            lambda: client.responses.input_items.list(UNKNOWN),
        ):
            with pytest.raises(openai.NotFoundError):
                call_it()
        with pytest.raises(
            openai.BadRequestError, match="or a response before it, was never stored or has expired"
        ) as refused:
            client.responses.create(input=ASK, previous_response_id=second.id, **ASKED)
        assert (refused.value.code, refused.value.param) == ("previous_response_not_found", "previous_response_id")


def test_a_response_that_is_not_stored_says_so(site: TenantSite) -> None:
    with site.client("none") as client:
        assert client.responses.create(input=ASK, **ASKED).store is False
    with site.client("small") as client:
        large = {str(part): "".join(sha256(bytes([part, n])).hexdigest() for n in range(8)) for part in range(16)}
        assert client.responses.create(input=ASK, metadata=large, **ASKED).store is False
        kept = [client.responses.create(input=f"{n}", **ASKED).id for n in range(6)]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(kept[0])
        assert client.responses.retrieve(kept[-1]).id == kept[-1]
    with site.client("acme") as client:
        unstored = client.responses.create(input=ASK, store=False, **ASKED)
        assert unstored.store is False
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(unstored.id)


def test_a_response_of_another_tenant_is_answered_as_an_unknown_one(site: TenantSite) -> None:
    with site.client("globex") as client:
        foreign = client.responses.create(input=ASK, **ASKED)
    for method, path, body in (
        ("GET", "/v1/responses/{}", None),
        ("DELETE", "/v1/responses/{}", None),
        ("GET", "/v1/responses/{}/input_items", None),
        ("POST", "/v1/responses/{}/cancel", None),
        ("POST", "/v1/responses", {"input": ASK, "previous_response_id": "{}", **ASKED}),
        ("POST", "/v1/responses", {"input": [{"type": "item_reference", "id": foreign.output[0].id}], **ASKED}),
    ):
        answers = [told(site, method, path, body, name) for name in (foreign.id, UNKNOWN)]
        assert answers[0] == answers[1], "but for the id that was asked for"
        assert answers[0][0] in (400, 404)
    with site.client("globex") as client:
        assert client.responses.retrieve(foreign.id) == foreign


def told(site: TenantSite, method: str, path: str, body: Any, name: str) -> tuple[int, str, list[str]]:
    """The status, the text and the names of the headers that `acme` is answered with."""
    asked = None if body is None else {k: v.replace("{}", name) if isinstance(v, str) else v for k, v in body.items()}
    headers = {"authorization": f"Bearer {site.keys['acme']}"}
    url = f"{site.server.url}{path.format(name)}"
    reply = httpx.request(method, url, json=asked, headers=headers, timeout=PATIENCE)
    return reply.status_code, reply.text.replace(name, "ID"), sorted(reply.headers)


def test_a_stored_response_survives_a_kill(tmp_path: Path) -> None:
    with tenant_site(TenantSite, tmp_path, POLICY) as site, site.client("acme") as client:
        answered = [client.responses.create(input=f"Count from 3 to {n}.", **ASKED) for n in range(5, 9)]
        site.server.process.send_signal(signal.SIGKILL)
        site.server.process.wait()
    with tenant_site(TenantSite, tmp_path, POLICY) as site, site.client("acme") as client:
        eventually(lambda: site.get("acme").is_success)
        assert [client.responses.retrieve(one.id) for one in answered] == answered


def test_a_conversation_that_the_context_does_not_hold_is_refused_or_loses_its_oldest_messages(
    site: TenantSite,
) -> None:
    spoken: Any = [
        {"role": role, "content": f"{role} {turn}: " + "word " * 60}
        for turn in range(20)
        for role in ("user", "assistant")
    ]
    asked: Any = {**ASKED, "input": [*spoken, {"role": "user", "content": "Count from 3 to 6."}]}
    with site.client("acme") as client:
        with pytest.raises(openai.BadRequestError, match="maximum context length"):
            client.responses.create(**asked)
        cut = client.responses.create(**asked, instructions="Be brief.", truncation="auto", max_output_tokens=100)
    assert cut.usage is not None and 1000 < cut.usage.input_tokens <= 2048 - 100
