"""Answers that have to match something, as the official client asks: at a live server, parts of which die."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.backend.structured_output.grammars import crossing, optional
from tests.gateway.http_workers import NUMBERS_OF_WORKERS
from tests.gateway.server_process import eventually, sluice
from tests.gateway.tenant_site import TenantSite, tenant_site

MODEL = "embedded"
POLICY = "tenants: {acme: {}, other: {}, third: {}}"
HI = [{"role": "user", "content": "Count from 3 to 12."}]


class Person(BaseModel):
    name: Literal["Ann", "Bob"]
    age: Literal[1, 22, 333]
    is_here: bool


class Site(TenantSite):
    def ask(self, tenant: str = "acme", **fields: Any) -> Any:
        """What a tenant is answered; `structured` is vLLM's field."""
        asked: dict[str, Any] = {"model": MODEL, "messages": HI, "max_tokens": 60, "temperature": 1, "seed": 5} | fields
        structured = asked.pop("structured", None)
        extra = {name: asked.pop(name) for name in ("min_tokens",) if name in asked}
        extra |= {} if structured is None else {"structured_outputs": structured}
        with self.client(tenant) as client:
            reply = client.chat.completions.create(**asked, extra_body=extra)
            return list(reply) if isinstance(reply, openai.Stream) else reply

    def text(self, tenant: str = "acme", **fields: Any) -> str:
        return str(self.ask(tenant, **fields).choices[0].message.content)

    def refused(self, **fields: Any) -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as refusal:
            self.ask(**fields)
        return refusal.value


@pytest.fixture(scope="module", params=NUMBERS_OF_WORKERS)
def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    path = tmp_path_factory.mktemp("structured")
    flags = ("--http-workers", str(request.param), "--refused-per-second", "10000", "--event-log", str(path / "events"))
    with tenant_site(Site, path, POLICY, *flags) as site:
        yield site


def schema(value: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": value, "strict": True}}


def charges(site: Site, tenant: str) -> list[float]:
    """What the event log says that a tenant was charged for beside the engine, in seconds."""
    entries = [json.loads(line) for line in (site.policy.parent / "events").read_text().splitlines()]
    return [entry[3] for entry in entries if entry[0] == "charge" and entry[2] == tenant]


def grammar_processes(site: Site) -> list[int]:
    """The processes that this server has forked for grammars."""
    parents = dict[int, int]()
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words = (path / "cmdline").read_bytes().split(b"\0")
            parent = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            continue
        if b"backend.structured_output.grammar_process" in words:
            parents[int(path.name)] = parent
    return [pid for pid, parent in parents.items() if parents.get(parent) == site.server.process.pid]


def test_a_pydantic_model_comes_back_parsed(site: Site) -> None:
    with site.client("acme") as client:
        for seed in range(4):
            answer = client.chat.completions.parse(
                model=MODEL, messages=HI, response_format=Person, max_tokens=250, temperature=1, seed=seed
            )
            assert isinstance(answer.choices[0].message.parsed, Person)
            assert answer.choices[0].finish_reason == "stop"


def test_patterns_choices_and_grammars_are_matched_whole(site: Site) -> None:
    assert re.fullmatch(r"\d{3}-[a-f]{2}", site.text(structured={"regex": r"\d{3}-[a-f]{2}"}))
    assert site.text(structured={"choice": ["yes", "no, never"]}) in ("yes", "no, never")
    assert re.fullmatch("x[a-z]{3}", site.text(structured={"grammar": 'start: "x" NAME\nNAME: /[a-z]{3}/'}))
    assert json.loads(site.text(structured={"json": {"enum": [1, "a"]}})) in (1, "a")


@pytest.mark.parametrize("text", ["a<|end|>b", "<|end|>", "<tool_call>cafe\u0301"])
def test_the_name_of_a_token_is_only_text_in_what_an_answer_has_to_match(site: Site, text: str) -> None:
    named = {"type": "object", "properties": {text: {"const": [text]}}, "required": [text]}
    for structured in (
        {"choice": [text]}, {"regex": text.replace("|", r"\|")}, {"grammar": f"start: {json.dumps(text)}"},
    ):  # fmt: skip
        answer = site.ask(structured=structured).choices[0]
        assert (answer.message.content, answer.finish_reason) == (text, "stop")
    answer = site.ask(response_format=schema({**named, "additionalProperties": False})).choices[0]
    assert (json.loads(answer.message.content), answer.finish_reason) == ({text: [text]}, "stop")


def test_streamed_texts_equal_the_whole_answers(site: Site) -> None:
    asked = {
        "response_format": schema(Person.model_json_schema() | {"additionalProperties": False}),
        "max_tokens": 250,
        "temperature": 0.8,
    }
    chunks = site.ask(**asked, stream=True, stream_options={"include_usage": True})
    whole = site.ask(**asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    Person.model_validate_json(text)
    assert chunks[-1].usage == whole.usage


def test_several_answers_and_their_neighbours_keep_to_themselves(site: Site) -> None:
    free = site.text(temperature=0)
    answers = site.ask(structured={"regex": "[ab]{8}"}, n=4)
    texts = [choice.message.content for choice in answers.choices]
    assert all(re.fullmatch("[ab]{8}", text) for text in texts)
    assert len(set(texts)) > 1
    assert site.text(temperature=0) == free


def test_an_unenforceable_grammar_is_refused_by_its_place(site: Site) -> None:
    refusal = site.refused(response_format=schema({"properties": {"a": {"not": {"const": 1}}}}))
    assert (refusal.status_code, refusal.code) == (400, "invalid_grammar")
    assert refusal.param == "response_format.json_schema.schema"
    assert "#/properties/a/not" in refusal.message
    refusal = site.refused(response_format=schema({"oneOf": [{"type": "object"}, {"required": ["a"]}]}))
    assert "(at #/oneOf)" in refusal.message
    key = f"sk-sluice-{'7' * 40}"  # which somebody put into a schema by mistake
    refusal = site.refused(response_format=schema({"properties": {key: {"type": "string", "pattern": "["}}}))
    assert "(at #/properties/***" in refusal.message and "7777" not in refusal.message
    refusal = site.refused(response_format=schema({"type": "array", "minItems": 2, "maxItems": 1}))
    assert "response_format.json_schema.schema: Unsatisfiable schema" in refusal.message
    refusal = site.refused(structured={"grammar": "start: nowhere"})
    assert "structured_outputs.grammar: At 1(8): unknown name" in refusal.message
    refusal = site.refused(structured={"regex": "(a"})
    assert (refusal.param, refusal.code) == ("structured_outputs.regex", "invalid_grammar")


def test_without_strict_what_is_not_enforced_is_said_in_a_header(site: Site) -> None:
    properties = {"m": {"const": 1}, "r\u00e9gion, 1\n": {"type": "string", "format": "iri", "maxLength": 3}}
    loose = {"type": "object", "properties": properties, "required": ["m"], "uniqueItems": True}
    form: Any = {
        "type": "json_schema",
        "json_schema": {"name": "x", "schema": {**loose, "additionalProperties": False}},
    }
    with site.client("acme") as client:
        for streams in (False, True):
            asked: Any = {"model": MODEL, "messages": HI, "max_tokens": 90, "response_format": form, "stream": streams}
            reply = client.chat.completions.with_raw_response.create(**asked)
            field = "response_format.json_schema.schema"
            assert reply.headers["x-sluice-ignored"].split(", ") == [
                f"{field}/uniqueItems", f"{field}/properties/r%C3%A9gion%2C%201%0A/format",
            ]  # fmt: skip
            reply.parse()
        plain = client.chat.completions.with_raw_response.create(model=MODEL, messages=HI, max_tokens=1)  # type: ignore[arg-type]
        assert "x-sluice-ignored" not in plain.headers
    answer = site.text(response_format={"type": "json_object", "schema": {"const": {"a": 1}}})
    assert json.loads(answer) == {"a": 1}


def test_a_grammar_that_takes_too_long_is_refused_and_the_next_one_is_served(site: Site) -> None:
    for hard, reason in ((optional(3000), "250 ms of a processor"), (crossing(16), "too large")):
        refusal = site.refused(response_format=schema(hard))
        assert (refusal.status_code, refusal.code) == (400, "grammar_too_complex")
        assert reason in refusal.message
    assert site.text(structured={"choice": ["yes"]}) == "yes"


def test_an_answer_that_may_have_no_token_ends_with_an_error_of_its_own(site: Site) -> None:
    assert site.text(structured={"choice": ["yes"]}) == "yes"
    processes = grammar_processes(site)
    with site.client("acme") as client, pytest.raises(openai.APIStatusError) as error:
        client.chat.completions.create(
            model=MODEL, messages=HI, extra_body={"structured_outputs": {"regex": "y+!"}, "allowed_token_ids": [0]}
        )
    assert site.text(structured={"choice": ["yes"]}) == "yes"
    assert grammar_processes(site) == processes, "the step that was in flight asked for its mask behind no token"
    assert (error.value.status_code, error.value.code) == (400, "no_token_allowed")


def test_an_end_token_that_a_grammar_names_where_nothing_matches_yet_is_an_error(site: Site) -> None:
    with pytest.raises(openai.APIStatusError) as error:
        site.ask(structured={"grammar": 'start: "a" <|end|> "b"'})
    assert (error.value.status_code, error.value.code) == (400, "no_token_allowed")
    assert site.text(structured={"grammar": 'start: "a" <|end|>'}) == "a"


def test_an_answer_that_matches_and_cannot_go_on_ends_before_it_has_its_least_tokens(site: Site) -> None:
    processes = grammar_processes(site)
    for asked in ({}, {"logprobs": True}, {"temperature": 0}):
        answer = site.ask(structured={"choice": ["yes"]}, min_tokens=20, **asked)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("yes", "stop")
    longer = site.ask(structured={"regex": "yes( or no){0,40}"}, min_tokens=20, max_tokens=90)
    assert re.fullmatch("yes( or no)+", longer.choices[0].message.content)
    assert longer.usage.completion_tokens >= 20
    assert grammar_processes(site) == processes


def test_masks_are_charged_once_an_answer_to_the_tenant_that_they_were_for(site: Site) -> None:
    for _ in range(3):
        site.text("third", structured={"regex": "[p-t]{30}"})  # compiled once, which is charged too
    site.text("third", max_tokens=5)
    before = len(charges(site, "other"))
    site.text("other", structured={"choice": ["last"]})
    eventually(lambda: len(charges(site, "other")) == before + 2)
    assert [0 < seconds < 1 for seconds in charges(site, "third")] == 4 * [True]


def test_killed_grammar_processes_come_back_and_answers_that_run_are_whole(site: Site) -> None:
    asked: dict[str, Any] = {"max_tokens": 400, "seed": 9}
    structured = {"regex": "([a-f]{3}-){40}end"}
    expected = site.text(structured=structured, **asked)
    with site.client("acme") as client:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=HI,  # type: ignore[arg-type]
            temperature=1,
            stream=True,
            extra_body={"structured_outputs": structured},
            **asked,
        )
        pieces = [next(stream).choices[0].delta.content or "" for _ in range(5)]
        killed = grammar_processes(site)
        assert killed
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        pieces += [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == expected
    assert site.text("other", structured={"choice": ["yes"]}) == "yes"
    eventually(lambda: not set(killed) & set(grammar_processes(site)))


def test_log_lines_and_the_event_log_name_what_an_answer_had_to_match(site: Site) -> None:
    def logged(response: str) -> dict[str, Any] | None:
        lines = map(json.loads, site.server.log.read_text().splitlines())
        return next((line for line in lines if line.get("response_id") == response), None)

    constrained, plain = site.ask(response_format=schema(crossing(3))).id, site.ask(tenant="other").id
    eventually(lambda: logged(constrained) is not None and logged(plain) is not None)
    line, other = logged(constrained), logged(plain)
    assert line is not None and other is not None and "grammar" not in other
    assert line["grammar_kind"] == "json_schema" and line["grammar_seconds"] > 0
    assert 0 <= line["jump_forward_tokens"] <= line["output_tokens"]
    told, events = f"has to match the grammar {line['grammar']}", str(site.policy.parent / "events")
    eventually(lambda: told in sluice("explain", constrained, "--log", events).stdout)
