"""The whole gateway on a device on paper: clients that leave, a model without numbers, no garbage of any request."""

import asyncio
import gc
import json
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from admission.outcome import Outcome
from backend.scheduler.batch import NO_TOKEN, Batch, StepOutput
from backend.text.tokenizer import Tokenizer
from gateway.telemetry.request_record import RequestRecord
from quotas.errors import LimitExceeded, StoreUnavailable
from tests.backend.paper_device import PaperDevice, continuation
from tests.examples import examples
from tests.gateway.paper_gateway import END, KEY, Client, Gateway
from tests.gateway.workers.paper_worker import through_worker

NUM_CANCELLATIONS = examples(200, at_night=10_000)
NUM_CLIENTS = 48

dividing = pytest.mark.parametrize("has_worker", [False, True], ids=["one process", "through a worker"])


def random_client(rng: random.Random) -> Client:
    body: dict[str, object] = {"model": "paper", "stream": rng.random() < 0.5, "max_tokens": rng.randint(1, 40)}
    if rng.random() < 0.3:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": "one two"[: rng.randint(1, 7)]}]
    else:
        path = "/v1/completions"
        body["prompt"] = [[rng.randrange(1024)] * rng.randint(1, 50) for _ in range(rng.choice((1, 1, 3)))]
    if rng.random() < 0.2:
        body["stop"] = ["e", "7"]
    if rng.random() < 0.2:
        body["n"] = rng.randint(2, 5)
    raw = json.dumps(body).encode()
    cut = rng.randrange(len(raw))
    stops = rng.randint(0, 6) if rng.random() < 0.3 else None
    return Client(path, [raw[:cut], raw[cut:]], stops)


async def leave_somewhere(gateway: Gateway, rng: random.Random) -> None:
    client = random_client(rng)
    turns = int(rng.expovariate(1 / 60)) if rng.random() < 0.9 else rng.randint(0, 3)
    leaving = asyncio.create_task(client.leave_after(turns))
    await client.ask(gateway.app)
    await leaving


async def stay(gateway: Gateway, rng: random.Random) -> None:
    """One among the leavers who gets every token that the device computes for it alone."""
    prompt = [rng.randrange(1024) for _ in range(rng.randint(1, 40))]
    body = {"model": "paper", "prompt": prompt, "max_tokens": 30}
    status = 503
    while status == 503:
        client = Client("/v1/completions", [json.dumps(body).encode()])
        await client.ask(gateway.app)
        status = client.sent[0]["status"]
    usage = json.loads(client.sent[1]["body"])["usage"]
    assert usage["completion_tokens"] == len(continuation(prompt, 30, END))


async def play(gateway: Gateway) -> None:
    rng = random.Random(1)
    outcomes = gateway.outcomes

    async def leaver() -> None:
        while outcomes[Outcome.DISCONNECTED] < NUM_CANCELLATIONS:
            await leave_somewhere(gateway, rng)
            if outcomes.total() % 100 == 0:
                gateway.scheduler.check_integrity()

    async def stayer() -> None:
        for _ in range(20):
            await stay(gateway, rng)

    async with asyncio.TaskGroup() as group:
        for _ in range(NUM_CLIENTS):
            group.create_task(leaver())
        for _ in range(2):
            group.create_task(stayer())


@dividing
async def test_random_cancellations_leave_nothing_behind(embedded_tokenizer: Tokenizer, has_worker: bool) -> None:
    before = asyncio.all_tasks()
    gateway = Gateway(embedded_tokenizer)
    worker = await through_worker(gateway) if has_worker else None
    gateway.engine.start()
    await play(gateway)
    async with asyncio.timeout(240):
        while gateway.scheduler.has_work or gateway.service.telemetry.live:
            await asyncio.sleep(0.001)
    if worker is not None:
        assert worker.is_idle
        await worker.close()

    gateway.scheduler.check_integrity()
    assert gateway.scheduler.kv_manager.num_held == 0
    assert not gateway.scheduler.blocks_in_flight
    assert gateway.engine.num_streams == 0
    assert not gateway.active_requests._scopes
    assert not gateway.store.outstanding
    assert gateway.store.num_reserved == len(gateway.store.usages) > NUM_CANCELLATIONS / 2
    assert asyncio.all_tasks() == before
    assert not gateway.engine.failed.done()

    outcomes = gateway.outcomes
    assert outcomes[Outcome.FAILED] == outcomes[Outcome.INVALID] == 0
    assert outcomes[Outcome.DISCONNECTED] >= NUM_CANCELLATIONS
    counters = gateway.scheduler.counters
    assert min(counters.preemptions, counters.late_tokens, outcomes[Outcome.REFUSED], outcomes[Outcome.COMPLETED]) > 0
    await gateway.engine.shut_down()


BROKEN = 77  # a token of the prompt that the model has no numbers for


@pytest.fixture
async def broken_gateway(embedded_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Gateway:
    slots: set[int] = set()
    execute = PaperDevice.execute

    def broken(device: PaperDevice, batch: Batch) -> StepOutput:
        for admitted in batch.admitted:
            (slots.add if BROKEN in admitted.token_ids else slots.discard)(admitted.slot)
        output = execute(device, batch)
        sampled = zip(batch.sampled_slots, output.token_ids, strict=True)
        tokens = [NO_TOKEN if slot in slots else token for slot, token in sampled]
        return replace(output, token_ids=tokens)

    monkeypatch.setattr(PaperDevice, "execute", broken)
    return Gateway(embedded_tokenizer)


def body(prompt: list[int], **fields: Any) -> bytes:
    return json.dumps({"model": "paper", "prompt": prompt, "max_tokens": 6, **fields}).encode()


@dividing
@pytest.mark.parametrize("stream", [False, True])
async def test_it_is_told_so_and_others_are_served(broken_gateway: Gateway, stream: bool, has_worker: bool) -> None:
    gateway = broken_gateway
    worker = await through_worker(gateway) if has_worker else None
    gateway.engine.start()
    broken = Client("/v1/completions", [body([5, BROKEN], stream=stream)])
    whole = Client("/v1/completions", [body([5, 6, 7], stream=stream)])
    await asyncio.gather(broken.ask(gateway.app), whole.ask(gateway.app))
    assert (broken.sent[0]["status"], whole.sent[0]["status"]) == (500, 200)
    error = json.loads(broken.sent[1]["body"])["error"]
    assert (error["type"], error["code"], "no numbers" in error["message"]) == ("internal_error", "model_failed", True)
    assert (b"x-should-retry", b"false") in broken.sent[0]["headers"]
    if worker is not None:
        await worker.close()
    assert gateway.outcomes == {Outcome.FAILED: 1, Outcome.COMPLETED: 1}
    assert gateway.scheduler.kv_manager.num_held == 0
    await gateway.engine.shut_down()


REQUESTS = 50
BODY: dict[str, Any] = {"model": "paper", "prompt": [5, 6, 7], "max_tokens": 6}


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.freeze()  # so that only what a test makes is looked at
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture(params=[False, True], ids=["one process", "through a worker"])
async def gateway(
    embedded_tokenizer: Tokenizer, no_collector: None, request: pytest.FixtureRequest
) -> AsyncIterator[Gateway]:
    gateway = Gateway(embedded_tokenizer)
    worker = await through_worker(gateway) if request.param else None
    gateway.engine.start()
    yield gateway
    if worker is not None:
        await worker.close()


async def ask(gateway: Gateway, body: dict[str, Any], key: str = KEY, **headers: str) -> int:
    client = Client("/v1/completions", [json.dumps(body).encode()], key=key, headers=headers)
    await client.ask(gateway.app)
    client.left.set()
    status: int = client.sent[0]["status"]
    return status


async def leave(gateway: Gateway, body: dict[str, Any]) -> None:
    client = Client("/v1/completions", [json.dumps(body).encode()])
    leaving = asyncio.create_task(client.leave_after(40))
    await client.ask(gateway.app)
    await leaving


def forgotten() -> int:
    """Requests in rings that nothing but the collector can reach."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    records = sum(isinstance(thing, RequestRecord) for thing in gc.garbage)
    gc.garbage.clear()
    gc.collect()
    return records


async def rings(gateway: Gateway, act: Callable[[], Awaitable[object]]) -> int:
    """How many of 50 requests leave one."""
    await act()
    forgotten()
    for _ in range(REQUESTS):
        await act()
    await asyncio.sleep(0)
    while gateway.service.telemetry.live:
        await asyncio.sleep(0)
    found = forgotten()
    await gateway.engine.shut_down()
    return found


@pytest.mark.parametrize(
    ("change", "key", "status"),
    [
        ({}, KEY, 200),
        ({"stream": True}, KEY, 200),
        ({"prompt": [[5], [6], [7]]}, KEY, 200),
        ({"max_tokens": -2}, KEY, 400),
        ({"model": "other"}, KEY, 404),
        ({}, "sk-nobody", 401),
    ],
)
async def test_a_request_that_is_answered_leaves_none(
    gateway: Gateway, change: dict[str, Any], key: str, status: int
) -> None:
    async def act() -> None:
        assert await ask(gateway, BODY | change, key) == status

    assert await rings(gateway, act) == 0


@pytest.mark.parametrize("refusal", [LimitExceeded, StoreUnavailable])
async def test_a_request_that_a_limit_refuses_leaves_none(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, refusal: type[Exception]
) -> None:
    async def reserve(*arguments: Any) -> None:
        raise LimitExceeded(arguments[2][0], 5, 1, 2.0) if refusal is LimitExceeded else StoreUnavailable("away")

    monkeypatch.setattr(gateway.store, "reserve", reserve)

    async def act() -> None:
        assert await ask(gateway, BODY) in (429, 503)

    assert await rings(gateway, act) == 0


async def test_a_request_that_would_come_too_late_leaves_none(gateway: Gateway) -> None:
    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(ask(gateway, BODY | {"prompt": [5] * 50, "max_tokens": 40}))
        await asyncio.sleep(0)
        found = await rings(gateway, lambda: ask(gateway, BODY, **{"x-sluice-ttft-ms": "0.001"}))
    assert found == 0


async def test_a_client_that_leaves_leaves_none(gateway: Gateway) -> None:
    assert await rings(gateway, lambda: leave(gateway, BODY | {"stream": True, "max_tokens": 80})) == 0
