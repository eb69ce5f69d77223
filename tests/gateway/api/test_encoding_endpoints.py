"""Requests to embed, on an encoder on paper."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from admission.encoding import EncodingLimits
from backend.text.tokenizer import Tokenizer
from gateway.api.encoding_service import EncodingService
from gateway.api.frontend import EncoderSetup, ServedEncoder
from gateway.api.routes import make_app
from quotas.quotas import Grant
from quotas.reservation import LimitState
from tests.gateway.api.test_encoding_service import PaperEncoder
from tests.gateway.paper_gateway import Client, Gateway


class Site:
    def __init__(self, tokenizer: Tokenizer) -> None:
        self.gateway = gateway = Gateway(tokenizer)
        self.encoder = PaperEncoder()
        self.passed = 0.0  # seconds, by the clock of the telemetry
        clock = gateway.engine.clock
        gateway.service.telemetry.clock = lambda: clock() + self.passed
        service = EncodingService({"e": self.encoder}, gateway.engine, gateway.service.core, EncodingLimits(0.0))
        gateway.client.service = replace(gateway.service, encoding=service)
        encoder = ServedEncoder(EncoderSetup("e", Path(), 0, "embed", 2, 512, 1024), tokenizer)
        second = replace(gateway.frontend.model, name="second"), tokenizer
        self.app = make_app(replace(gateway.frontend, encoders={"e": encoder}, others={"second": second}), {})

    async def embed(self, given: object, model: str = "e", **headers: str) -> Any:
        """Returns the response's head and its body."""
        return await self.ask("/v1/embeddings", {"model": model, "input": given}, **headers)

    async def ask(self, path: str, body: object, **headers: str) -> Any:
        client = Client(path, [json.dumps(body).encode()], headers=headers)
        await client.ask(self.app)
        return client.sent[0], json.loads(b"".join(one.get("body", b"") for one in client.sent[1:]))


@pytest.fixture
async def site(embedded_tokenizer: Tokenizer) -> AsyncIterator[Site]:
    site = Site(embedded_tokenizer)
    site.gateway.engine.start()
    yield site
    await site.gateway.engine.shut_down()


async def test_a_deadline_counts_from_the_arrival_of_the_request(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    head, _ = await site.embed("a b", **{"x-sluice-deadline-ms": "60000"})
    assert head["status"] == 200
    read, reserve = site.gateway.frontend.body_reader.read, site.gateway.service.quotas.reserve

    async def slow_read(*given: Any) -> Any:
        site.passed += 40.0
        return await read(*given)

    async def slow_reserve(*given: Any) -> Any:
        site.passed += 40.0
        return await reserve(*given)

    monkeypatch.setattr(site.gateway.frontend.body_reader, "read", slow_read)
    head, _ = await site.embed("a b", **{"x-sluice-deadline-ms": "60000"})
    assert head["status"] == 200
    monkeypatch.setattr(site.gateway.service.quotas, "reserve", slow_reserve)
    head, body = await site.embed("a b", **{"x-sluice-deadline-ms": "60000"})
    assert (head["status"], body["error"]["code"]) == (503, "deadline_unmeetable")


async def test_a_served_model_of_the_other_kind_is_never_said_not_to_exist(site: Site) -> None:
    for model in ("paper", "second"):
        head, body = await site.embed("a b", model)
        assert head["status"] == 400 and f"{model!r} generates text and embeds none" in body["error"]["message"]
    head, body = await site.ask("/v1/completions", {"model": "e", "prompt": "a b"})
    assert head["status"] == 400 and "'e' embeds or scores texts and generates none" in body["error"]["message"]
    head, _ = await site.embed("a b", "none")
    assert head["status"] == 404


async def test_a_refusal_tells_what_is_left_of_the_limits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grant, "states", property(lambda grant: (LimitState(grant.reservation.limits[0], 7, 1.0),)))
    served, _ = await site.embed([[5, 6]])
    refused, _ = await site.embed([[5, 6]], **{"x-sluice-deadline-ms": "0.0001"})
    names = [{name for name, _ in head["headers"] if b"ratelimit" in name} for head in (served, refused)]
    assert (served["status"], refused["status"]) == (200, 503)
    assert names[0] and names[0] == names[1]


async def test_of_one_huge_text_as_much_is_encoded_as_is_read(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, sizes = site.gateway.frontend.tokenizer, list[int]()
    encode = tokenizer.encode_inputs

    def counted(inputs: Any) -> list[list[int]]:
        sizes.append(sum(map(len, inputs)))
        return encode(inputs)

    monkeypatch.setattr(tokenizer, "encode_inputs", counted)
    head, body = await site.embed("a b " * 250_000)
    assert (head["status"], body["error"]["code"]) == (400, "context_length_exceeded")
    assert "input[0] holds at least " in body["error"]["message"]
    assert 0 < max(sizes) < 100_000


@pytest.mark.parametrize("text", ["ab cd " * 30_000, "x" * 200_000, " " * 200_000 + "a b", "a\n" * 90_000])
def test_a_text_that_is_cut_has_the_tokens_that_it_has_as_a_whole(embedded_tokenizer: Tokenizer, text: str) -> None:
    encoder = ServedEncoder(EncoderSetup("e", Path(), 0, "embed", 2, 512, 1024), embedded_tokenizer)
    assert encoder.token_ids([text], -1, ["input"]) == [embedded_tokenizer.encode_inputs([text])[0][:512]]
    pairs = [(text, "a"), ("a", text)]
    found = [encoder._cut(ids, 7) for ids in embedded_tokenizer.encode_inputs(pairs)]
    assert encoder.token_ids(pairs, 7, ["a", "b"]) == found


@pytest.mark.parametrize("given", [["a"] * 40, [[5] * 500] * 40])
async def test_many_short_inputs_are_not_encoded_on_the_event_loop(
    site: Site, monkeypatch: pytest.MonkeyPatch, given: list[Any]
) -> None:
    threads = set[int]()
    token_ids = ServedEncoder.token_ids

    def noted(*said: Any, **named: Any) -> list[list[int]]:
        threads.add(threading.get_ident())
        return token_ids(*said, **named)

    monkeypatch.setattr(ServedEncoder, "token_ids", noted)
    head, _ = await site.embed(given)
    assert head["status"] == 200 and threads and threading.get_ident() not in threads


async def test_long_texts_to_embed_keep_no_other_tenants_body_or_text_waiting(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, reader = site.gateway.frontend.tokenizer, site.gateway.frontend.body_reader
    began, may_end, sizes, encode = threading.Event(), threading.Event(), list[int](), tokenizer.encode_inputs

    def held(inputs: Any) -> list[list[int]]:
        sizes.append(sum(map(len, inputs)))
        began.set()
        may_end.wait(240)
        return encode(inputs)

    monkeypatch.setattr(tokenizer, "encode_inputs", held)
    texts = [f"a {n} " * 50 for n in range(1000)]
    asked = asyncio.create_task(site.embed(texts, **{"x-sluice-deadline-ms": "0.0001"}))
    while not began.is_set():
        await asyncio.sleep(0)
    assert await reader.offload("other", 100_000, lambda: 1) == 1
    assert await reader.encode("other", tokenizer, lambda: 1) == 1
    may_end.set()
    await asked
    assert sum(sizes) == sum(map(len, texts)) and max(sizes) < 2**16 + 2000
