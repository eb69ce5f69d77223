"""Responses that are stored: conversations go on from them, across a kill, and no tenant learns of another's."""

import signal
from contextlib import ExitStack, suppress
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response

from tests.gateway.http_workers import NUMBERS_OF_WORKERS
from tests.gateway.server_process import PATIENCE, eventually, in_threads
from tests.gateway.tenant_site import TenantSite, error_of, site_fixture, tenant_site

POLICY = """
tenants:
  acme: {}
  globex: {}
  one: {limits: {concurrent_requests: 1}, stored_responses: {background: 1}}
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
LONG: Any = {"model": "embedded", "input": "Hi", "max_output_tokens": 1900, "extra_body": {"ignore_eos": True}}
UNKNOWN = f"resp_{'0' * 48}"
UNKNOWN_CONVERSATION = f"conv_{'0' * 48}"


site = site_fixture(TenantSite, POLICY, "--refused-per-second", "1000", workers=NUMBERS_OF_WORKERS)


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


def test_another_tenants_response_and_conversation_are_answered_as_unknown_ones(site: TenantSite) -> None:
    with site.client("globex") as client:
        foreign = client.responses.create(input=ASK, **ASKED)
        theirs = client.conversations.create(items=[{"role": "user", "content": "Hi"}])
        (item,) = client.conversations.items.list(theirs.id).data
    response, conversation = (foreign.id, UNKNOWN), (theirs.id, UNKNOWN_CONVERSATION)
    calls: list[tuple[str, str, Any, tuple[str, str]]] = [
        ("GET", "/v1/responses/{}", None, response),
        ("GET", "/v1/responses/{}?stream=true", None, response),
        ("DELETE", "/v1/responses/{}", None, response),
        ("GET", "/v1/responses/{}/input_items", None, response),
        ("POST", "/v1/responses/{}/cancel", None, response),
        ("POST", "/v1/responses", {"input": ASK, "previous_response_id": "{}", **ASKED}, response),
        (
            "POST",
            "/v1/responses",
            {"input": [{"type": "item_reference", "id": foreign.output[0].id}], **ASKED},
            response,
        ),
        ("GET", "/v1/conversations/{}", None, conversation),
        ("POST", "/v1/conversations/{}", {"metadata": {"a": "b"}}, conversation),
        ("DELETE", "/v1/conversations/{}", None, conversation),
        ("GET", "/v1/conversations/{}/items", None, conversation),
        ("POST", "/v1/conversations/{}/items", {"items": [{"role": "user", "content": "Hi"}]}, conversation),
        ("GET", f"/v1/conversations/{{}}/items/{item.id}", None, conversation),
        ("DELETE", f"/v1/conversations/{{}}/items/{item.id}", None, conversation),
        ("POST", "/v1/responses", {"input": ASK, "conversation": "{}", **ASKED}, conversation),
    ]
    for method, path, body, names in calls:
        answers = [told(site, method, path, body, name) for name in names]
        assert answers[0] == answers[1], "but for the id that was asked for"
        assert answers[0][0] in (400, 404)
    with site.client("globex") as client:
        assert client.responses.retrieve(foreign.id) == foreign
        assert client.conversations.retrieve(theirs.id) == theirs
        assert client.conversations.items.retrieve(item.id, conversation_id=theirs.id) == item


def told(site: TenantSite, method: str, path: str, body: Any, name: str) -> tuple[int, str, list[str]]:
    """The status, the text and the names of the headers that `acme` is answered with."""
    asked = None if body is None else {k: v.replace("{}", name) if isinstance(v, str) else v for k, v in body.items()}
    headers = {"authorization": f"Bearer {site.keys['acme']}"}
    url = f"{site.server.url}{path.format(name)}"
    reply = httpx.request(method, url, json=asked, headers=headers, timeout=PATIENCE)
    return reply.status_code, reply.text.replace(name, "ID"), sorted(reply.headers)


def test_the_time_of_an_answer_does_not_tell_a_foreign_id_from_an_unknown_one(site: TenantSite) -> None:
    with site.client("globex") as client:
        foreign = client.responses.create(input=ASK, **ASKED).id
        theirs = client.conversations.create(items=[{"role": "user", "content": "Hi"}]).id
    site.check_alike("acme", [("GET", "/v1/responses/{}")], foreign, UNKNOWN)
    site.check_alike("acme", [("GET", "/v1/conversations/{}")], theirs, UNKNOWN_CONVERSATION)


def test_a_conversation_keeps_its_items_and_each_response_adds_to_it(site: TenantSite) -> None:
    with site.client("acme") as client:
        empty = client.conversations.create()
        assert empty.metadata == {} and client.conversations.items.list(empty.id).data == []
        spoken: Any = [
            {"role": "system", "content": "Be brief."},
            {"type": "message", "role": "user", "content": "Hello"},
        ]
        talk = client.conversations.create(metadata={"topic": "weather"}, items=spoken)
        assert client.conversations.retrieve(talk.id) == talk and talk.object == "conversation"
        assert client.conversations.update(talk.id, metadata={"topic": "rain"}).metadata == {"topic": "rain"}
        first = client.responses.create(input=ASK, conversation=talk.id, **ASKED)
        assert first.conversation is not None and first.conversation.id == talk.id
        (call,) = first.output
        assert call.type == "function_call"
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
        with client.responses.stream(input=[result], conversation={"id": talk.id}, **ASKED) as stream:
            second = stream.get_final_response()
        assert second.output_text == "The weather in Paris is sunny."
        assert second.usage is not None and second.usage.input_tokens_details.cached_tokens > 0
        items = client.conversations.items.list(talk.id, order="asc", limit=100).data
        kinds = ["message"] * 3 + ["function_call", "function_call_output", "message"]
        assert [one.type for one in items] == kinds and items[3].id == call.id
        newest = client.conversations.items.list(talk.id, limit=2)
        assert [one.id for one in newest.data] == [items[5].id, items[4].id] and newest.has_more
        added = client.conversations.items.create(talk.id, items=[{"role": "user", "content": "Count from 3 to 6."}])
        assert client.conversations.items.retrieve(added.data[0].id, conversation_id=talk.id) == added.data[0]
        referred: Any = [{"type": "item_reference", "id": added.data[0].id}]
        third = client.responses.create(input=referred, conversation=talk.id, store=False, **ASKED)
        assert third.output_text == "3, 4, 5, 6"
        assert client.conversations.items.delete(added.data[0].id, conversation_id=talk.id).id == talk.id
        with pytest.raises(openai.NotFoundError):
            client.conversations.items.retrieve(added.data[0].id, conversation_id=talk.id)
        assert client.conversations.delete(talk.id).deleted
        client.conversations.delete(talk.id)  # a client repeats what it got no answer to
        with pytest.raises(openai.NotFoundError) as missing:
            client.responses.create(input=ASK, conversation=talk.id, **ASKED)
        assert (missing.value.code, missing.value.param) == ("conversation_not_found", "conversation")
    with site.client("small") as client:
        digests = "".join(sha256(bytes([n])).hexdigest() for n in range(64))
        with pytest.raises(openai.BadRequestError, match=r"stored_responses\.bytes has no room"):
            client.conversations.create(items=[{"role": "user", "content": digests}])


def test_turns_that_add_to_a_conversation_at_once_are_all_kept(site: TenantSite) -> None:
    with site.client("acme") as client:
        talk = client.conversations.create()

        def add(number: int) -> None:
            client.conversations.items.create(talk.id, items=[{"role": "user", "content": str(number)}])

        with in_threads(*(partial(add, number) for number in range(6))):
            pass
        items: Any = client.conversations.items.list(talk.id).data
        assert sorted(one.content[0].text for one in items) == [*map(str, range(6))]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("", {"items": "Hi"}, "items"),
        ("", {"items": [{"role": "user", "content": "Hi"}] * 21}, "items"),
        ("", {"metadata": {"a": 1}}, "metadata.a"),
        (
            "",
            {"items": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "items[0].content[0].type",
        ),
        ("", {"items": [{"type": "item_reference", "id": "x"}]}, "items[0].type"),
        ("", {"items": [7]}, "items[0]"),
        (f"/{UNKNOWN_CONVERSATION}", {}, "metadata"),
        (f"/{UNKNOWN_CONVERSATION}/items", {"items": []}, "items"),
    ],
)
def test_a_malformed_conversation_is_a_typed_error(site: TenantSite, path: str, body: Any, param: str) -> None:
    headers = site.authorization("acme")
    reply = httpx.post(f"{site.server.url}/v1/conversations{path}", json=body, headers=headers, timeout=PATIENCE)
    assert reply.status_code == 400 and error_of(reply)["param"] == param, reply.text


def ended(client: openai.OpenAI, name: str) -> Response:
    eventually(lambda: client.responses.retrieve(name).status not in ("queued", "in_progress"))
    return client.responses.retrieve(name)


def test_a_response_in_the_background_is_computed_without_its_client(site: TenantSite) -> None:
    with site.client("acme") as client:
        talk = client.conversations.create()
        queued = client.responses.create(input="Count from 3 to 6.", background=True, conversation=talk.id, **ASKED)
        assert (queued.status, queued.background, queued.output) == ("queued", True, [])
        done = ended(client, queued.id)
        assert (done.status, done.output_text) == ("completed", "3, 4, 5, 6")
        assert len(client.conversations.items.list(talk.id).data) == 2
        assert client.responses.cancel(done.id) == done, "which has ended"
        following = client.responses.create(input="Count from 4 to 7.", previous_response_id=done.id, **ASKED)
        assert following.output_text == "4, 5, 6, 7"
        with client.responses.stream(response_id=done.id) as stream:  # type: ignore[call-overload]
            assert stream.get_final_response().output_text == "3, 4, 5, 6"
        client.responses.delete(done.id)
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(done.id)
        with pytest.raises(openai.BadRequestError, match="background needs store"):
            client.responses.create(input=ASK, background=True, store=False, **ASKED)
        plain = client.responses.create(input="Count from 3 to 6.", **ASKED)
        with pytest.raises(openai.BadRequestError, match="Only a response in the background"):
            client.responses.cancel(plain.id)
    with site.client("small") as client:
        varied: Any = {**LONG, "temperature": 2, "extra_body": {"ignore_eos": True}}
        failed = ended(client, client.responses.create(background=True, **varied).id)
        assert failed.status == "failed" and failed.error is not None
        assert "stored_responses.bytes has no room" in failed.error.message, "not that a replica was lost"
    with site.client("none") as client, pytest.raises(openai.BadRequestError, match="has to be stored"):
        client.responses.create(input=ASK, background=True, **ASKED)


def test_a_stream_in_the_background_is_taken_up_where_it_was_left(site: TenantSite) -> None:
    with site.client("acme") as client:
        with client.responses.create(background=True, stream=True, **LONG) as stream:
            seen = [next(stream) for _ in range(8)]
        assert [one.type for one in seen[:3]] == ["response.created", "response.queued", "response.in_progress"]
        name = seen[0].response.id  # type: ignore[union-attr]
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            client.responses.create(input=ASK, previous_response_id=name, **ASKED)
        with client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number) as stream:
            seen += stream
        assert [one.sequence_number for one in seen] == [*range(len(seen))]
        assert seen[-1].type == "response.incomplete"
        text = "".join(one.delta for one in seen if one.type == "response.output_text.delta")
        assert text == seen[-1].response.output_text == client.responses.retrieve(name).output_text
        with client.responses.retrieve(name, stream=True) as stream:
            assert [*stream] == seen, "again, from the first"
        refused = site.get("acme", f"/v1/responses/{name}?stream=true&starting_after=x")
        assert refused.status_code == 400 and error_of(refused)["param"] == "starting_after"


def _follow_until_refused(client: openai.OpenAI, name: str) -> None:
    with ExitStack() as followed:
        while True:  # each process that answers HTTP opens as many as it may
            followed.enter_context(client.responses.retrieve(name, stream=True))


def test_a_response_in_the_background_is_cancelled_counted_and_bounded(site: TenantSite) -> None:
    with site.client("one") as client:
        with client.responses.create(background=True, stream=True, **LONG) as begun:  # its events are kept as they come
            running = next(iter(begun)).response
        for refused in ({"background": True}, {}):
            with pytest.raises(openai.RateLimitError) as busy:
                client.responses.create(input=ASK, **ASKED, **refused)
            assert busy.value.code == "concurrency_exceeded"
        with pytest.raises(openai.BadRequestError, match="has not ended"):
            client.responses.delete(running.id)
        cancelled = client.responses.cancel(running.id)
        assert cancelled.status == "cancelled" and client.responses.cancel(running.id) == cancelled
        assert client.responses.retrieve(running.id) == cancelled
        assert [*client.responses.retrieve(running.id, stream=True)][-1].type == "response.cancelled"
        client.responses.delete(running.id)
        eventually(site.server.is_idle)
        assert client.responses.create(input="Count from 3 to 6.", **ASKED).output_text == "3, 4, 5, 6"


def test_the_event_streams_of_a_response_in_the_background_are_bounded(site: TenantSite) -> None:
    with site.client("one") as client:
        with client.responses.create(background=True, stream=True, **LONG) as begun:
            running = next(iter(begun)).response
        eventually(lambda: client.responses.retrieve(running.id).status == "in_progress")
        with pytest.raises(openai.RateLimitError, match="event streams of its responses"):
            _follow_until_refused(client, running.id)
        client.responses.cancel(running.id)  # if it has not come to its end
        events: list[Any] = []
        while not events:
            with suppress(openai.RateLimitError):  # until the streams are seen to be closed
                events += client.responses.retrieve(running.id, stream=True)
        assert events[-1].type in ("response.cancelled", "response.incomplete")
        client.responses.delete(running.id)
        eventually(site.server.is_idle)


def test_a_stored_response_survives_a_kill_and_one_in_the_background_has_failed(tmp_path: Path) -> None:
    with tenant_site(TenantSite, tmp_path, POLICY, "--quota-lease", "3") as site, site.client("acme") as client:
        answered = [client.responses.create(input=f"Count from 3 to {n}.", **ASKED) for n in range(5, 9)]
        lost = client.responses.create(background=True, **LONG)
        site.server.process.send_signal(signal.SIGKILL)
        site.server.process.wait()
    with tenant_site(TenantSite, tmp_path, POLICY, "--quota-lease", "3") as site, site.client("acme") as client:
        eventually(lambda: site.get("acme").is_success)
        assert [client.responses.retrieve(one.id) for one in answered] == answered
        failed = ended(client, lost.id)
        assert failed.status == "failed" and failed.error is not None and "was lost" in failed.error.message
        events = [*client.responses.retrieve(lost.id, stream=True)]
        assert [one.type for one in events] == ["response.created", "response.failed"]
        client.responses.delete(lost.id)


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
