"""Inputs are embedded beside the steps of an engine, for whose seconds their tenants pay."""

import asyncio
import math
import struct
import threading
from collections.abc import AsyncIterator, Callable, Sequence

import pytest

from admission.core import CoreConfig, make_core
from admission.encoding import EncodingLimits, EncodingRequest
from backend.engine import Engine
from backend.errors import DeviceError
from backend.scheduler.sequence import SPARE_CLASS
from backend.worker.device_stream import CpuStream
from backend.worker.side_job import WorkStream
from gateway.api.encoding_service import EncodingService
from gateway.api.engine_client import EncodingAsk
from gateway.errors import DeadlineExceeded, DeadlineUnmeetable, InternalError, ModelFailed, Overloaded
from tests.backend.sequences import make_sequence
from tests.gateway.paper_gateway import CONFIG, PaperExecutor


class PaperEncoder:
    """An input's vector is its sum and its length. It can be held, and fails on a negative id; 666 has no vector."""

    measured = ((1, 1e-3), (100, 2e-3))

    def __init__(self, stream: WorkStream | None = None) -> None:
        self.stream = stream or CpuStream()
        self.batches: list[int] = []
        self.num_tokens = 0
        self.may_go = threading.Event()
        self.may_go.set()

    def vectors(self, inputs: Sequence[Sequence[int]]) -> list[bytes | None]:
        self.may_go.wait(60)
        self.batches.append(len(inputs))
        self.num_tokens += sum(map(len, inputs))
        if any(min(one) < 0 for one in inputs):
            raise ValueError("a planted secret")
        return [None if sum(one) == 666 else struct.pack("ff", sum(one), len(one)) for one in inputs]


class Rig:
    def __init__(self) -> None:
        self.core = make_core(CoreConfig(), CONFIG)
        self.engine = Engine(self.core, PaperExecutor())
        self.encoder = PaperEncoder()
        limits = EncodingLimits(longest_wait_s=0.0, waiting_tokens=100)
        self.service = EncodingService({"e": self.encoder}, self.engine, self.core, limits)
        self.engine.start()

    async def encode(
        self, *inputs: list[int], tenant: str = "acme", within: float = math.inf, is_spare: bool = False
    ) -> list[tuple[float, ...]]:
        queued = EncodingRequest(tenant, [len(one) for one in inputs], 0.0, is_spare)
        vectors = await self.service.encode(EncodingAsk("e", inputs, within), queued)
        return [struct.unpack("ff", vector) for vector in vectors]


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    yield rig
    rig.encoder.may_go.set()
    await rig.engine.shut_down()


async def test_each_input_has_its_vector_and_its_tenant_pays(rig: Rig) -> None:
    one, two = await asyncio.gather(rig.encode([1, 2], [3]), rig.encode([4, 5, 6], tenant="globex"))
    assert (one, two) == ([(3.0, 2.0), (3.0, 1.0)], [(15.0, 3.0)])
    charged = {tenant: rig.core.share.account(tenant).charged for tenant in ("acme", "globex")}
    assert all(seconds > 0.0 for seconds in charged.values())
    assert sum(rig.encoder.batches) == 3 and rig.encoder.num_tokens == 6


class PaperStream:
    """Each batch has taken 3 s of the device, and much longer on the host's clock, since steps ran before it."""

    def launch(self, work: Callable[[], object], /) -> "PaperStream":
        work()
        return self

    def synchronize(self) -> float:
        return 3.0


async def test_a_batch_is_charged_the_device_time_that_it_took(rig: Rig) -> None:
    rig.encoder.stream = PaperStream()
    await rig.encode([1, 2], [3])
    assert rig.core.share.account("acme").charged == pytest.approx(3.0)


async def test_inputs_that_come_while_a_batch_is_computed_share_the_next(rig: Rig) -> None:
    rig.encoder.may_go.clear()
    first = asyncio.create_task(rig.encode([1]))
    await until(lambda: rig.service.queues["e"].num_tokens == 0 and bool(rig.service._waiting))
    others = [asyncio.create_task(rig.encode([number])) for number in range(2, 9)]
    await asyncio.sleep(0)
    rig.encoder.may_go.set()
    assert [found for ((found, _),) in await asyncio.gather(first, *others)] == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]
    assert rig.encoder.batches == [1, 7]


async def test_a_failed_input_reveals_nothing_of_the_inside_and_others_go_on(rig: Rig) -> None:
    with pytest.raises(InternalError) as failed:
        await rig.encode([1, -1])
    assert "secret" not in failed.value.message
    assert await rig.encode([7]) == [(7.0, 1.0)]


async def test_an_input_without_a_vector_fails_alone(rig: Rig) -> None:
    failed, found = await asyncio.gather(rig.encode([666]), rig.encode([7], tenant="globex"), return_exceptions=True)
    assert isinstance(failed, ModelFailed) and found == [(7.0, 1.0)]


async def test_a_full_queue_and_deadlines_are_refusals_and_a_client_that_leaves_is_forgotten(rig: Rig) -> None:
    with pytest.raises(DeadlineUnmeetable):
        await rig.encode([1] * 50, within=1e-9)
    rig.encoder.may_go.clear()
    running = asyncio.create_task(rig.encode([1]))
    await until(lambda: rig.service.queues["e"].num_tokens == 0 and bool(rig.service._waiting))
    leaving = asyncio.create_task(rig.encode([1] * 90))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await rig.encode([1] * 11)
    with pytest.raises(DeadlineExceeded):
        await rig.encode([1] * 5, within=0.05)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert rig.service.queues["e"].num_tokens == 0
    rig.encoder.may_go.set()
    assert await running == [(1.0, 1.0)]
    assert not rig.service._waiting


async def test_batches_alternate_with_the_steps_of_answers(rig: Rig) -> None:
    stream = rig.engine.submit(make_sequence("s", "chat", 4, 40))
    found = await asyncio.gather(*[rig.encode([number], tenant="embeds") for number in range(20)])
    while stream.finish_reason is None:
        await stream.take()
    assert stream.sequence.output and [one[0][0] for one in found] == list(map(float, range(20)))


async def test_answers_of_a_batch_never_hold_up_inputs_however_much_their_tenant_has_used(rig: Rig) -> None:
    rig.core.charge_side_work("embeds", 5.0, rig.engine.clock())
    stream = rig.engine.submit(make_sequence("s", "night", 4, 50, priority_class=SPARE_CLASS))
    await stream.take()
    assert await rig.encode([7], tenant="embeds") == [(7.0, 1.0)]
    assert stream.finish_reason is None


async def test_answers_of_others_do_not_hold_up_inputs_of_a_tenant_in_debt_until_they_end(rig: Rig) -> None:
    stream = rig.engine.submit(make_sequence("s", "chat", 4, 90, ends=()))
    await stream.take()
    rig.core.charge_side_work("embeds", 5.0, rig.engine.clock())
    assert await rig.encode([7], tenant="embeds") == [(7.0, 1.0)]
    assert len(stream.sequence.output) < 90


async def test_lines_to_encode_wait_for_answers_and_inputs_and_cost_their_tenant_nothing_among_these(rig: Rig) -> None:
    stream = rig.engine.submit(make_sequence("s", "chat", 4, 40))
    line = asyncio.create_task(rig.encode([1], tenant="embeds", is_spare=True))
    assert await rig.encode([2], tenant="embeds") == [(2.0, 1.0)]
    while stream.finish_reason is None:
        assert not line.done()
        await stream.take()
    charged = rig.core.share.account("embeds").charged
    assert await line == [(1.0, 1.0)]
    assert rig.core.share.account("embeds").charged == charged
    assert rig.core.ledger.spare.account("embeds").charged > 0.0


async def test_lines_to_encode_take_turns_with_the_answers_of_batches(rig: Rig) -> None:
    stream = rig.engine.submit(make_sequence("s", "night", 4, 50, priority_class=SPARE_CLASS))
    assert await rig.encode([1], tenant="embeds", is_spare=True) == [(1.0, 1.0)]
    assert stream.finish_reason is None


async def test_of_an_engine_that_has_failed_nothing_is_expected(rig: Rig) -> None:
    rig.engine.fail(DeviceError("gone"))
    with pytest.raises(DeviceError):
        await rig.encode([1])


async def test_inputs_that_wait_hear_of_a_failure_of_the_engine(rig: Rig) -> None:
    rig.encoder.may_go.clear()
    asked = [asyncio.create_task(rig.encode([number])) for number in range(2)]
    await until(lambda: len(rig.service._waiting) == 2)
    rig.engine.fail(DeviceError("gone"))
    async with asyncio.timeout(240):
        assert [str(one) for one in await asyncio.gather(*asked, return_exceptions=True)] == ["gone", "gone"]
    assert not rig.service._waiting


async def test_inputs_of_a_tenant_in_debt_wait_for_no_paused_answer(rig: Rig) -> None:
    sequence = make_sequence("s", "chat", 4, 40)
    sequence.limit_to(sequence.num_prompt_tokens + 3)
    rig.engine.submit(sequence)
    await until(lambda: bool(sequence.output) and not rig.core.in_flight)
    rig.core.arrive(make_sequence("t", "embeds", 4, 40), rig.engine.clock())
    rig.core.charge_side_work("embeds", 5.0, rig.engine.clock())
    async with asyncio.timeout(240):
        assert await rig.encode([1, 2], tenant="embeds") == [(3.0, 2.0)]


async def until(holds: object) -> None:
    while not holds():  # type: ignore[operator]
        await asyncio.sleep(0.001)
