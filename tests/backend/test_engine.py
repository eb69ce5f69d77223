"""The engine over a device whose steps complete when the test says so."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from queue import SimpleQueue

import pytest

from admission.admission import Admission
from admission.controller import Controller
from admission.core import CoreConfig, make_core
from admission.outcome import QueueFull
from backend.engine import Engine
from backend.errors import DeviceError, MemoryExhausted
from backend.sampling_params import SamplingParams
from backend.scheduler.batch import NO_TOKEN, Batch, StepOutput
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from backend.stream import STREAMS_PER_CALLBACK, TokenStream
from tests.backend.paper_device import PaperDevice, continuation
from tests.backend.scheduler.bench import END, make_config


class _Step:
    def __init__(self, run: Callable[[], StepOutput]) -> None:
        self.wait = run


class SteppedExecutor:
    """Completes a step for each `allow`, or fails it; all that follow once `free` is called."""

    def __init__(self, block_size: int) -> None:
        self._device = PaperDevice(block_size)
        self._permits: SimpleQueue[BaseException | None] = SimpleQueue()
        self._free = threading.Event()
        self.most_launched = 0
        self.room: int | None = None  # tokens that a step may have; None: any number
        self.lost = 0
        self.broken_step: int | None = None  # in which the first row has no token
        self._launched = 0

    def allow(self, error: BaseException | None = None) -> None:
        self._permits.put(error)

    def free(self) -> None:
        self._free.set()
        self._permits.put(None)

    def launch(self, batch: Batch) -> _Step:
        if self.room is not None and sum(batch.lengths) > self.room:
            self.lost += 1
            raise MemoryExhausted(f"no memory for {sum(batch.lengths)} tokens")
        self._launched += 1
        self.most_launched = max(self.most_launched, self._launched)
        return _Step(lambda: self._wait(batch))

    def _wait(self, batch: Batch) -> StepOutput:
        error = None if self._free.is_set() and self._permits.empty() else self._permits.get()
        if error is not None:
            raise error
        self._launched -= 1
        output = self._device.execute(batch)
        if batch.step == self.broken_step:
            return replace(output, token_ids=[NO_TOKEN, *output.token_ids[1:]])
        return output


class Bench:
    def __init__(self, max_waiting: int = 100) -> None:
        config = make_config()
        self.executor = SteppedExecutor(config.block_size)
        core = make_core(CoreConfig(max_waiting=max_waiting), config)
        self.scheduler = core.scheduler
        self.engine = Engine(core, self.executor)
        self.admission = Admission(self.engine, core)

    def request(self, name: str = "r", prompt: tuple[int, ...] = (5, 6, 7), max_tokens: int = 8) -> Sequence:
        return Sequence(name, "tenant", list(prompt), SamplingParams(temperature=0), max_tokens, 0, frozenset([END]))

    async def settle(self) -> None:
        """Until the device has nothing more to do without a permit."""
        for _ in range(200):
            await asyncio.sleep(0)


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    bench.engine.start()
    try:
        yield bench
    finally:
        bench.executor.free()
        await bench.engine.stop()


async def drain(stream: TokenStream) -> list[int]:
    tokens: list[int] = []
    while stream.finish_reason is None:
        tokens += await stream.take()
    return tokens + stream.rest()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with running(Bench()) as bench:
        yield bench


async def test_streams_carry_every_token_in_order_and_end_with_a_reason(bench: Bench) -> None:
    bench.executor.free()
    with bench.admission.admit(bench.request()) as stream:
        tokens = await drain(stream)
    assert tokens == continuation([5, 6, 7], 8, END)
    assert stream.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


async def test_many_streams_share_batches_without_mixing_their_tokens(bench: Bench) -> None:
    bench.executor.free()

    async def one(n: int) -> None:
        with bench.admission.admit(bench.request(f"r{n}", (n, n + 1, 9))) as stream:
            assert await drain(stream) == continuation([n, n + 1, 9], 8, END)

    await asyncio.gather(*(one(n) for n in range(2 * STREAMS_PER_CALLBACK)))
    assert bench.engine.num_streams == 0
    assert bench.scheduler.pool.num_free == bench.scheduler.config.num_blocks


async def test_the_device_has_its_next_step_before_this_one_completes(bench: Bench) -> None:
    with bench.admission.admit(bench.request()) as stream:
        await bench.settle()
        bench.executor.allow()
        await stream.take()
        await bench.settle()
        assert len(bench.scheduler.in_flight) == 2


async def test_leaving_the_scope_frees_the_blocks_when_the_last_step_in_flight_completes(bench: Bench) -> None:
    with bench.admission.admit(bench.request()) as stream:
        await bench.settle()
    assert stream.sequence.status is SequenceStatus.FINISHED
    assert bench.scheduler.pool.num_free < bench.scheduler.config.num_blocks
    bench.executor.free()
    while bench.scheduler.in_flight:
        await asyncio.sleep(0.001)
    assert bench.scheduler.pool.num_free == bench.scheduler.config.num_blocks
    assert stream.sequence.output == []


async def test_a_full_queue_refuses_and_keeps_nothing() -> None:
    async with running(Bench(max_waiting=1)) as bench:
        with bench.admission.admit(bench.request("first")):
            with pytest.raises(QueueFull), bench.admission.admit(bench.request("second")):
                pass
            assert len(bench.scheduler.waiting) == 1


async def test_a_device_failure_ends_every_stream_and_refuses_new_ones(bench: Bench) -> None:
    with bench.admission.admit(bench.request()) as stream:
        bench.executor.allow(RuntimeError("CUDA error: an illegal memory access was encountered"))
        with pytest.raises(DeviceError, match="illegal memory access"):
            await drain(stream)
    assert bench.engine.failed.done()
    with pytest.raises(DeviceError), bench.admission.admit(bench.request("later")):
        pass


@pytest.mark.parametrize("room", [1, 2, 5])
async def test_steps_without_memory_are_planned_again_with_less_and_every_stream_is_whole(
    bench: Bench, room: int
) -> None:
    bench.executor.free()
    bench.executor.room = room

    async def one(n: int) -> None:
        with bench.admission.admit(bench.request(f"r{n}", (n, n + 1, 9), 12)) as stream:
            assert await drain(stream) == continuation([n, n + 1, 9], 12, END)

    await asyncio.gather(*(one(n) for n in range(8)))
    assert bench.executor.lost and bench.scheduler.counters.lost_steps == bench.executor.lost
    assert not bench.engine.failed.done()
    assert bench.scheduler.pool.num_free == bench.scheduler.config.num_blocks


async def test_memory_that_runs_out_while_a_step_computes_costs_nobody_a_token(bench: Bench) -> None:
    with bench.admission.admit(bench.request(max_tokens=8)) as stream:
        await bench.settle()
        bench.executor.allow()
        tokens = await stream.take()
        bench.executor.allow(MemoryExhausted("no memory"))
        bench.executor.free()
        assert tokens + await drain(stream) == continuation([5, 6, 7], 8, END)
    assert bench.scheduler.counters.lost_steps == 1


async def test_a_sequence_without_numbers_ends_alone_and_its_blocks_are_free(bench: Bench) -> None:
    bench.executor.broken_step = 3
    bench.executor.free()
    with (
        bench.admission.admit(bench.request("broken")) as broken,
        bench.admission.admit(bench.request("whole", (8, 9))) as whole,
    ):
        tokens = await drain(broken)
        assert broken.finish_reason is FinishReason.FAILED
        assert tokens == continuation([5, 6, 7], 8, END)[: len(tokens)]
        assert len(tokens) == len(broken.sequence.output) < 8
        rest = await drain(whole)
        assert rest == continuation([8, 9], 8, END)
    assert not bench.engine.failed.done()
    assert bench.scheduler.pool.num_free == bench.scheduler.config.num_blocks
    assert bench.scheduler.counters.generation_tokens == len(tokens) + len(rest)
    bench.scheduler.check_integrity()


async def test_a_device_without_memory_for_a_single_token_has_failed(bench: Bench) -> None:
    bench.executor.room = 0
    with bench.admission.admit(bench.request()) as stream, pytest.raises(DeviceError, match="no memory"):
        await drain(stream)
    assert bench.engine.failed.done()


async def test_a_consumer_that_wants_the_whole_is_woken_for_the_first_and_the_last_token(bench: Bench) -> None:
    bench.executor.free()
    with bench.admission.admit(bench.request(max_tokens=20)) as stream:
        stream.eager = False
        parts = [await stream.take()]
        while stream.finish_reason is None:
            parts.append(await stream.take())
    assert len(parts) <= 2
    assert [token for part in parts for token in part] == continuation([5, 6, 7], 20, END)


async def test_an_engine_that_never_started_stops_as_well() -> None:
    await Bench().engine.stop()


@pytest.mark.parametrize("call", ["schedule", "take_ended", "update_from_output", "rollback"])
async def test_a_core_that_fails_ends_every_stream_and_refuses_new_ones(
    bench: Bench, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the books are wrong")

    with bench.admission.admit(bench.request()) as stream:
        if call in ("update_from_output", "rollback"):
            await bench.settle()
        monkeypatch.setattr(Controller, call, fail)
        bench.executor.allow(MemoryExhausted("no memory") if call == "rollback" else None)
        async with asyncio.timeout(240):
            with pytest.raises(DeviceError, match="the core failed"):
                await drain(stream)
    with pytest.raises(DeviceError), bench.admission.admit(bench.request("later")):
        pass
    (record,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert "the books are wrong" in str(record.exc_info)
