"""Several answers to one prompt: what they hold on the real engine, and that they are let in and end as one."""

import asyncio
import json

import pytest

from backend import LLM, SamplingParams
from backend.scheduler.batch import Batch
from backend.scheduler.sequence import FinishReason
from backend.text.tokenizer import Tokenizer
from tests.gateway.paper_gateway import Client, Gateway


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("embedded")


PROMPT = [5 + n % 500 for n in range(1000)]
OUTPUT = 256


def test_eight_answers_to_a_long_prompt_take_one_prefill_and_little_more_memory_than_their_tokens(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, before, schedule = 0, llm.scheduler.counters.prompt_tokens, llm.scheduler.schedule

    def watched(now: float = 0.0) -> Batch | None:
        nonlocal held
        held = max(held, llm.scheduler.kv_manager.num_held)
        batch: Batch | None = schedule(now)
        return batch

    monkeypatch.setattr(llm.scheduler, "schedule", watched)
    asked = [SamplingParams(seed=n, max_tokens=OUTPUT, ignore_eos=True) for n in range(8)]
    answers = llm.generate([PROMPT] * 8, asked, progress=False)
    assert [len(answer.token_ids) for answer in answers] == [OUTPUT] * 8
    assert llm.scheduler.counters.prompt_tokens - before == len(PROMPT)
    assert held * llm.scheduler.config.block_size <= 1.05 * (len(PROMPT) + 8 * OUTPUT)


def test_answers_that_are_cancelled_are_free_within_two_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, schedule = 0, llm.scheduler.schedule

    def cancelling(now: float = 0.0) -> Batch | None:
        nonlocal steps
        running = list(llm.scheduler.running.values())
        if steps == 0 and len(running) == 8 and all(sequence.output for sequence in running):
            for sequence in running:
                llm.scheduler.finish_sequence(sequence, FinishReason.CANCELLED)
            steps = 1
        batch: Batch | None = schedule(now)
        if steps and llm.scheduler.kv_manager.num_held:
            steps += 1
        return batch

    monkeypatch.setattr(llm.scheduler, "schedule", cancelling)
    llm.generate([PROMPT[::-1]] * 8, SamplingParams(max_tokens=64, ignore_eos=True), progress=False)
    assert 0 < steps <= 3 and llm.scheduler.kv_manager.num_held == 0


def _asking(num_answers: int) -> Client:
    body = {"model": "paper", "prompt": [5, 6, 7], "max_tokens": 6, "n": num_answers}
    return Client("/v1/completions", [json.dumps(body).encode()])


async def test_answers_are_let_in_together_or_not_at_all(embedded_tokenizer: Tokenizer) -> None:
    """40 sequences may wait, and 8 run. The engine begins only when all have asked."""
    gateway = Gateway(embedded_tokenizer)
    clients = [_asking(count) for count in (30, 30, 18, 11, 1)]
    asks = []
    for client in clients:
        asks.append(asyncio.create_task(client.ask(gateway.app)))
        for _ in range(20):
            await asyncio.sleep(0)
    assert gateway.engine.num_streams == 30 + 18
    gateway.engine.start()
    await asyncio.gather(*asks)
    assert [client.sent[0]["status"] for client in clients] == [200, 503, 200, 503, 503]
    found = [json.loads(client.sent[1]["body"]) for client in (clients[0], clients[2])]
    assert [len(reply["choices"]) for reply in found] == [30, 18]
    gateway.scheduler.check_integrity()
    assert gateway.scheduler.kv_manager.num_held == 0 and not gateway.store.outstanding
    await gateway.engine.shut_down()
