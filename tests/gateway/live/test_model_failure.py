"""A request for which the model computes no numbers: a typed error, for it alone."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from admission.outcome import Outcome
from backend.scheduler.batch import NO_TOKEN, Batch, StepOutput
from backend.text.tokenizer import Tokenizer
from tests.backend.paper_device import PaperDevice
from tests.gateway.paper_gateway import Client, Gateway

BROKEN = 77  # a token of the prompt that the model has no numbers for


@pytest.fixture
async def gateway(embedded_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    slots: set[int] = set()
    execute = PaperDevice.execute

    def broken(device: PaperDevice, batch: Batch) -> StepOutput:
        for admitted in batch.admitted:
            (slots.add if BROKEN in admitted.token_ids else slots.discard)(admitted.slot)
        output = execute(device, batch)
        sampled = [batch.slots[row] for row in batch.sampled]
        tokens = [NO_TOKEN if slot in slots else token for slot, token in zip(sampled, output.token_ids, strict=True)]
        return replace(output, token_ids=tokens)

    monkeypatch.setattr(PaperDevice, "execute", broken)
    return Gateway(embedded_tokenizer)


def body(prompt: list[int], **fields: Any) -> bytes:
    return json.dumps({"model": "paper", "prompt": prompt, "max_tokens": 6, **fields}).encode()


@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_told_so_and_those_beside_it_are_served(gateway: Gateway, stream: bool) -> None:
    gateway.engine.start()
    broken = Client("/v1/completions", [body([5, BROKEN], stream=stream)])
    whole = Client("/v1/completions", [body([5, 6, 7], stream=stream)])
    await asyncio.gather(broken.ask(gateway.app), whole.ask(gateway.app))
    assert (broken.sent[0]["status"], whole.sent[0]["status"]) == (500, 200)
    error = json.loads(broken.sent[1]["body"])["error"]
    assert (error["type"], error["code"], "no numbers" in error["message"]) == ("internal_error", "model_failed", True)
    assert (b"x-should-retry", b"false") in broken.sent[0]["headers"]
    assert gateway.outcomes == {Outcome.FAILED: 1, Outcome.COMPLETED: 1}
    assert gateway.scheduler.pool.num_free == gateway.scheduler.config.num_blocks
    await gateway.engine.stop()
