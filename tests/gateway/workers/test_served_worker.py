"""The engine's side of a worker: what it had ends with it, and what it says is looked at again."""

import asyncio
import json
import pickle
from collections.abc import Callable
from dataclasses import replace

import pytest
from starlette.types import ASGIApp

from admission.outcome import Outcome
from backend.scheduler.batch import StepOutput
from backend.scheduler.scheduled_step import NewToken
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.sequence import Sequence
from gateway.tenants.auth import DEMO
from gateway.workers.messages import Update
from quotas.policy.policy import Policy
from quotas.policy.policy_diff import PolicyEdit
from tests.backend.paper_device import continuation
from tests.gateway.paper_gateway import KEY, Client, Gateway
from tests.gateway.workers.paper_worker import PaperWorker, through_worker

PROMPT = [5, 6, 7, 8, 9]


def client_of(prompt: list[int], max_tokens: int = 60, stream: bool = True, **fields: object) -> Client:
    body = {"model": "paper", "prompt": prompt, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}
    return Client("/v1/completions", [json.dumps(body | fields).encode()])


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0)


async def status(app: ASGIApp, client: Client) -> int:
    await client.ask(app)
    client.left.set()
    return int(client.sent[0]["status"])


class Steps:
    """Looks, whenever a step is accounted for, whether some sequences still held memory until then. When it is launched
    would say less: by a device thread that is late, after others were planned.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.watched: list[Sequence] = []
        self.num_holding = 0
        account = Scheduler.update_from_output

        def counted(scheduler: Scheduler, output: StepOutput, now: float = 0.0) -> list[NewToken]:
            self.num_holding += any(sequence.block_table.blocks for sequence in self.watched)
            return account(scheduler, output, now)

        monkeypatch.setattr(Scheduler, "update_from_output", counted)


def sequences(worker: PaperWorker) -> list[Sequence]:
    return [timeline.sequence for _, record in worker.served._requests.values() for timeline in record.engine.timelines]


@pytest.mark.parametrize("is_killed", [True, False], ids=["worker", "client"])
async def test_a_client_that_left_holds_no_memory_two_steps_later_and_others_go_on(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch, is_killed: bool
) -> None:
    steps = Steps(monkeypatch)
    kept, gone = await through_worker(gateway), await through_worker(gateway)
    stays, leaves = client_of(PROMPT, stream_options={"include_usage": True}), client_of(PROMPT[1:])
    tasks = [asyncio.create_task(stays.ask(kept.app)), asyncio.create_task(leaves.ask(gone.app))]
    await until(lambda: len(leaves.sent) > 3 and len(stays.sent) > 3)
    if is_killed:
        note(gone.served, "_lost", lambda: steps.watched.extend(sequences(gone)))
        gone.client.link.abort()
    else:
        note(gone.served, "_close", lambda: steps.watched.extend(sequences(gone)))
        leaves.left.set()
    await until(lambda: steps.watched and not any(sequence.block_table.blocks for sequence in steps.watched))
    await asyncio.gather(*tasks)
    assert steps.num_holding <= 2
    await until(lambda: not gateway.service.telemetry.live)
    ended = Outcome.FAILED if is_killed else Outcome.DISCONNECTED
    assert gateway.outcomes == {Outcome.COMPLETED: 1, ended: 1}
    assert len(gateway.store.usages) == 2
    assert usage_of(stays)["completion_tokens"] == 60
    await kept.close()
    if not is_killed:
        await gone.close()


def note(served: object, name: str, look: Callable[[], object]) -> None:
    """Look right before a method is called."""
    method = getattr(served, name)

    def noted(*arguments: object) -> None:
        look()
        method(*arguments)

    if name == "_lost":
        served.link._lost = noted  # type: ignore[attr-defined]
    else:
        receivers = served._receivers  # type: ignore[attr-defined]
        (kind,) = [kind for kind, receiver in receivers.items() if receiver == method]
        receivers[kind] = noted


def text_of(client: Client) -> str:
    return b"".join(message.get("body", b"") for message in client.sent).decode()


def usage_of(client: Client) -> dict[str, int]:
    said = text_of(client).removesuffix("data: [DONE]\n\n").rstrip().rpartition("data: ")[2]
    usage: dict[str, int] = json.loads(said)["usage"]
    return usage


async def test_a_reservation_in_progress_is_returned_when_its_worker_dies(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker, asked, reserve = await through_worker(gateway), asyncio.Event(), gateway.store.reserve

    async def waits(*arguments: object) -> None:
        asked.set()
        await asyncio.Event().wait()

    monkeypatch.setattr(gateway.store, "reserve", waits)
    client = client_of(PROMPT, stream=False)
    task = asyncio.create_task(client.ask(worker.app))
    await asked.wait()
    worker.client.link.abort()
    await task
    await worker.lost.wait()
    assert client.sent[0]["status"] == 500
    await until(lambda: worker.is_idle)
    monkeypatch.setattr(gateway.store, "reserve", reserve)


async def test_a_key_is_looked_up_again_by_the_keys_as_they_are_here(gateway: Gateway) -> None:
    worker = await through_worker(gateway)
    gateway.service.keys.change([], [DEMO])
    assert await status(worker.app, client_of(PROMPT)) == 401
    await until(lambda: worker.is_idle)
    await worker.close()


async def test_an_edit_holds_once_it_was_taken_up(gateway: Gateway) -> None:
    worker = await through_worker(gateway)
    assert await status(worker.app, client_of(PROMPT, 2)) == 200
    policy = gateway.service.policies.current
    edited = Policy.of(policy.classes, policy.default, {"acme": replace(policy.default, name="acme", weight=7.0)})
    for before, after in ((policy, edited), (policy, edited), (edited, policy)):
        await worker.served.update(pickle.dumps(Update(policy=PolicyEdit.between(before, after))))
        assert worker.policies.current == after
    await worker.served.update(pickle.dumps(Update(revoked=[DEMO])))
    assert len(worker.keys) == 0
    assert await status(worker.app, client_of(PROMPT, 2)) == 401
    await until(lambda: worker.is_idle)
    await worker.close()
    await worker.served.update(pickle.dumps(Update()))  # it waits for no worker that is gone


async def test_a_tenant_that_was_refused_is_suspect_in_every_worker(gateway: Gateway) -> None:
    workers = [await through_worker(gateway) for _ in range(2)]
    assert await status(workers[0].app, client_of(PROMPT, 2, temperature=-1)) == 400
    await until(lambda: all(worker.client.refused_tenants for worker in workers))
    gateway.service.quotas._note_refused("demo", "demo")
    await until(lambda: all([*worker.client._refused_keys] == [("demo", "demo")] for worker in workers))
    for worker in workers:
        assert await status(worker.app, client_of(PROMPT, 2)) == 200
        await worker.close()


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
async def test_a_call_without_tokens_is_charged_as_one_request(gateway: Gateway, path: str) -> None:
    worker = await through_worker(gateway)
    body: dict[str, object] = {"model": "paper", "prompt": "one"} if path == "/tokenize" else {"tokens": [5, 6]}
    assert await status(worker.app, Client(path, [json.dumps(body).encode()], key=KEY)) == 200
    await until(lambda: gateway.store.usages and worker.is_idle)
    assert [(usage.requests, usage.output_tokens) for usage in gateway.store.usages] == [(1, 0)]
    await worker.close()


@pytest.mark.parametrize("stream", [False, True])
async def test_of_a_text_that_a_stop_string_ended_what_was_delivered_is_paid(gateway: Gateway, stream: bool) -> None:
    worker = await through_worker(gateway)
    text = worker.frontend.tokenizer.decode(continuation(PROMPT, 60, -1))
    stop = text[10:12]
    client = client_of(PROMPT, stream=stream, stop=[stop], stream_options={"include_usage": True} if stream else None)
    assert await status(worker.app, client) == 200
    await until(lambda: worker.is_idle and not gateway.service.telemetry.live)
    assert gateway.store.usages[-1].output_tokens == usage_of(client)["completion_tokens"] < 60
    await worker.close()


async def test_an_answer_in_one_piece_has_every_token(gateway: Gateway) -> None:
    worker = await through_worker(gateway)
    client = client_of(PROMPT, stream=False)
    assert await status(worker.app, client) == 200
    assert json.loads(text_of(client))["choices"][0]["text"] == worker.frontend.tokenizer.decode(
        continuation(PROMPT, 60, -1)
    )
    assert usage_of(client)["completion_tokens"] == 60
    assert sum(worker.deliveries.first_token.counts) == 1
    await until(lambda: worker.is_idle and not gateway.service.telemetry.live)
    await worker.close()
