"""A worker's side of its link: what waits for an engine that is gone fails, and what is over is forgotten."""

import asyncio
import math
from dataclasses import replace

import pytest

from admission.encoding import EncodingLimits
from admission.outcome import Outcome
from backend.errors import DeviceError
from gateway.api.encoding_service import EncodingService
from gateway.api.engine_client import EncodingAsk
from gateway.errors import BadRequest, CancelledByAdmin
from gateway.tenants.effective_policy import EffectivePolicy
from tests.gateway.api.test_encoding_service import PaperEncoder
from tests.gateway.paper_gateway import Gateway
from tests.gateway.workers.paper_worker import PaperWorker, through_worker
from tests.gateway.workers.test_served_worker import PROMPT, client_of, status, text_of, until


async def test_an_engine_that_is_gone_fails_what_is_served_and_what_is_asked(
    gateway: Gateway, caplog: pytest.LogCaptureFixture
) -> None:
    worker = await through_worker(gateway)
    streaming, whole = client_of(PROMPT), client_of(PROMPT, stream=False)
    tasks = [asyncio.create_task(client.ask(worker.app)) for client in (streaming, whole)]
    await until(lambda: len(streaming.sent) > 3)
    question = asyncio.create_task(worker.client.ask("health", "ready"))
    await asyncio.sleep(0)
    worker.served.link.abort()
    await asyncio.gather(*tasks)
    assert '"code":"internal_error"' in text_of(streaming) and "[DONE]" not in text_of(streaming)
    assert whole.sent[0]["status"] == 500
    with pytest.raises(DeviceError):
        await question
    assert worker.told == ["end"]
    assert await status(worker.app, client_of(PROMPT)) == 500
    with pytest.raises(DeviceError):
        await worker.client.ask("health", "ready")
    assert await worker.client.refused(BadRequest("no"), None, None, "192.0.2.1", 0) == 0.0
    await until(lambda: worker.is_idle)


async def test_a_request_that_is_cancelled_from_outside_tells_its_client(gateway: Gateway) -> None:
    worker, client = await through_worker(gateway), client_of(PROMPT)
    task = asyncio.create_task(client.ask(worker.app))
    await until(lambda: len(client.sent) > 3)
    (record,) = gateway.service.telemetry.live
    assert record.scope is not None
    record.scope.fail(CancelledByAdmin())
    record.scope.fail(BadRequest("the first counts"))
    await task
    assert '"code":"cancelled"' in text_of(client)
    await until(lambda: worker.is_idle and not gateway.service.telemetry.live)
    assert gateway.outcomes == {Outcome.FAILED: 1}
    record.scope.fail(CancelledByAdmin())  # it has ended: nobody is told
    assert isinstance(record.scope.error, CancelledByAdmin)
    await worker.close()


async def test_the_load_that_a_worker_tells_is_the_engines(gateway: Gateway) -> None:
    worker = await through_worker(gateway)
    assert await worker.client.load() == await gateway.client.load()
    await worker.close()


async def test_a_write_that_waits_for_its_client_is_told_of(gateway: Gateway) -> None:
    worker, client = await through_worker(gateway), client_of(PROMPT)
    client.stops_reading_after = 3
    task = asyncio.create_task(client.ask(worker.app))
    await until(worker.client.writing)
    ((number, since),) = worker.client.writing()
    assert number in worker.served._requests and since > 0
    client.left.set()
    await task
    assert worker.client.writing() == []
    await until(lambda: worker.is_idle and not gateway.service.telemetry.live)
    await worker.close()


async def test_answers_over_workers_equal_those_of_one_process(gateway: Gateway) -> None:
    worker, engine = await through_worker(gateway), gateway.client
    policy = policy_of(worker)
    assert await worker.client.health("ready") == await engine.health("ready")
    assert (await worker.client.metrics_text()).split()[:50] == (await engine.metrics_text()).split()[:50]
    assert await worker.client.limit_states(policy, None) == [*await engine.limit_states(policy, None)]
    assert await worker.client.kv_memory(policy) == await engine.kv_memory(policy)
    await worker.client.check_refusals(policy)
    await worker.client.refuse_spent(policy)
    await until(lambda: worker.is_idle)
    await worker.close()


def policy_of(worker: PaperWorker) -> EffectivePolicy:
    return worker.frontend.effective_policies.of(next(iter(worker.keys.of_tenant("demo"))))


async def test_inputs_whose_client_has_left_are_neither_encoded_nor_charged(gateway: Gateway) -> None:
    encoder, limits = PaperEncoder(), EncodingLimits(longest_wait_s=0.0, batch_tokens=4)
    encoding = EncodingService({"e": encoder}, gateway.engine, gateway.service.core, limits)
    gateway.client.service = replace(gateway.service, encoding=encoding)
    worker = await through_worker(gateway)
    encoder.may_go.clear()
    asking = asyncio.create_task(
        worker.client.encode(EncodingAsk("e", [[1, 2, 3, 4]] * 50, math.inf), policy_of(worker))
    )
    await until(lambda: gateway.store.outstanding)
    asking.cancel()
    await until(lambda: worker.is_idle)
    encoder.may_go.set()
    await until(lambda: gateway.store.usages)
    assert len(encoder.batches) <= 1
    assert gateway.store.usages[0].input_tokens <= 4
    await worker.close()


@pytest.mark.parametrize("num_turns", range(8))
async def test_a_charge_that_nobody_waits_for_is_returned(gateway: Gateway, num_turns: int) -> None:
    worker = await through_worker(gateway)
    charging = asyncio.create_task(worker.client.charge(policy_of(worker)))
    for _ in range(num_turns):
        await asyncio.sleep(0)
    charging.cancel()
    await asyncio.wait({charging})
    if not charging.cancelled():
        charging.result().close()
    await worker.client.ask("health", "ready")
    await until(lambda: worker.is_idle and not gateway.store.outstanding)
    assert all(usage.requests == 0 for usage in gateway.store.usages)
    await worker.close()


async def test_a_key_that_is_refused_while_it_is_cleared_stays_suspect(gateway: Gateway) -> None:
    worker = await through_worker(gateway)
    policy = policy_of(worker)
    suspect = (policy.name, policy.key)
    for is_refused_meanwhile in (True, False):
        worker.client._suspect([*suspect], memoryview(b""))
        clearing = asyncio.create_task(worker.client.refuse_unread(policy, "r"))
        await until(lambda: worker.client._questions)
        (number,) = worker.client._questions
        worker.client._answered([number, None, None], memoryview(b""))
        if is_refused_meanwhile:
            worker.client._suspect([*suspect], memoryview(b""))
        await clearing
        assert (suspect in worker.client._refused_keys) is is_refused_meanwhile
    await until(lambda: worker.is_idle)
    await worker.close()


async def test_a_refusal_is_sent_though_the_engine_is_lost_before_it_is_counted(gateway: Gateway) -> None:
    worker, client = await through_worker(gateway), client_of(PROMPT, temperature=-1)
    is_counting = asyncio.Event()

    async def counts(*_: object) -> None:
        is_counting.set()
        await asyncio.Event().wait()

    worker.served._questions["refused"] = counts
    asking = asyncio.create_task(client.ask(worker.app))
    await is_counting.wait()
    worker.served.link.abort()
    await asking
    assert client.sent[0]["status"] == 400
    await worker.lost.wait()


async def test_token_ids_vectors_and_contents_cross_as_they_are(gateway: Gateway) -> None:
    encoding = EncodingService({"e": PaperEncoder()}, gateway.engine, gateway.service.core, EncodingLimits())
    gateway.client.service = replace(gateway.service, encoding=encoding)
    worker, engine = await through_worker(gateway), gateway.client
    policy, asked = policy_of(worker), EncodingAsk("e", [[1], [2**31, 3], [4, 5, 6]], math.inf)
    assert (await worker.client.encode(asked, policy))[1] == (await engine.encode(asked, policy))[1]
    contents = bytes(range(256)) * 5
    assert await worker.client.store_response(policy, "r", None, contents)
    assert await worker.client.read_responses(policy.name, "r", True) == [contents]
    assert await worker.client.read_responses(policy.name, "other", True) is None
    await until(lambda: worker.is_idle)
    await worker.close()
