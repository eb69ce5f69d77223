import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace

import pytest

from admission.controller import Controller
from admission.outcome import QueueFull
from backend.adapter import make_adapter
from backend.config import Batching
from backend.errors import DeviceError, MemoryExhausted
from backend.scheduler.batching import RULES, BatchingRule
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import FinishReason, Sequence, SequenceStatus
from backend.stream import STREAMS_PER_CALLBACK
from backend.worker.device_stream import CpuStream
from backend.worker.side_job import SideJob
from tests.backend.paper_device import continuation
from tests.backend.scheduler.bench import END
from tests.backend.sequences import make_sequence
from tests.backend.stepped_engine import Bench, drain, running


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with running(Bench()) as bench:
        yield bench


async def test_streams_carry_every_token_in_order_and_end_with_a_reason(bench: Bench) -> None:
    bench.executor.free()
    with bench.admitted(bench.request()) as stream:
        tokens = await drain(stream)
    assert tokens == continuation([5, 6, 7], 8, END)
    assert stream.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)


async def test_many_streams_share_batches_without_mixing_their_tokens(bench: Bench) -> None:
    bench.executor.free()

    async def one(n: int) -> None:
        with bench.admitted(bench.request(f"r{n}", (n, n + 1, 9))) as stream:
            assert await drain(stream) == continuation([n, n + 1, 9], 8, END)

    await asyncio.gather(*(one(n) for n in range(2 * STREAMS_PER_CALLBACK)))
    assert bench.engine.num_streams == 0
    assert bench.scheduler.kv_manager.pool.num_free == bench.scheduler.config.num_blocks


async def test_the_device_has_its_next_step_before_this_one_completes(bench: Bench) -> None:
    with bench.admitted(bench.request()) as stream:
        await bench.settle()
        bench.executor.allow()
        await stream.take()
        await bench.settle()
        assert len(bench.scheduler.in_flight) == 2


async def test_leaving_the_scope_frees_the_blocks_when_the_last_step_in_flight_completes(bench: Bench) -> None:
    with bench.admitted(bench.request()) as stream:
        await bench.settle()
    assert stream.sequence.status is SequenceStatus.FINISHED
    assert bench.scheduler.kv_manager.pool.num_free < bench.scheduler.config.num_blocks
    bench.executor.free()
    while bench.scheduler.in_flight:
        await asyncio.sleep(0.001)
    assert bench.scheduler.kv_manager.pool.num_free == bench.scheduler.config.num_blocks
    assert stream.sequence.output == []


async def test_the_longest_need_of_a_tenant_counts_the_adapter(bench: Bench) -> None:
    adapted = make_sequence("r", "tenant", 3, 8, adapter=make_adapter("law", "", 1, 6))
    alone = bench.scheduler.config.blocks_for(3 + 8)
    with bench.admitted(adapted):
        assert bench.admission.longest_of(["tenant", "other"]) == {"tenant": alone + 6, "other": 0}


class Later(BatchingRule):
    """Lets a sequence join a while after it has come."""

    def plan(self, scheduled: ScheduledStep) -> None:
        self.wakes_at = None
        super().plan(scheduled)

    def why_closed(self, sequence: Sequence, scheduled: ScheduledStep) -> WaitReason | None:
        due = sequence.arrival + 0.3
        if scheduled.planned_at >= due:
            return None
        self.wakes_at = due
        return WaitReason.PEERS


async def test_a_request_that_waits_for_others_is_woken_though_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, Batching.CONTINUOUS, Later)
    async with running(Bench()) as bench:
        bench.executor.free()
        with bench.admitted(bench.request(max_tokens=1)) as stream:
            await bench.settle()
            assert bench.scheduler.wait_reason is WaitReason.PEERS and not bench.scheduler.in_flight
            assert await drain(stream) == continuation([5, 6, 7], 1, END)


async def test_a_full_queue_refuses_and_keeps_nothing() -> None:
    async with running(Bench(max_waiting=1)) as bench:
        with bench.admitted(bench.request("first")):
            with pytest.raises(QueueFull), bench.admitted(bench.request("second")):
                pass
            assert len(bench.scheduler.waiting) == 1


async def test_a_device_failure_ends_every_stream_and_refuses_new_ones(bench: Bench) -> None:
    with bench.admitted(bench.request()) as stream:
        bench.executor.allow(RuntimeError("CUDA error: an illegal memory access was encountered"))
        with pytest.raises(DeviceError, match="illegal memory access"):
            await drain(stream)
    assert bench.engine.failed.done()
    with pytest.raises(DeviceError), bench.admitted(bench.request("later")):
        pass


@pytest.mark.parametrize("tokens", [1, 2, 5])
async def test_steps_without_memory_are_planned_again_with_less_and_every_stream_is_whole(
    bench: Bench, tokens: int
) -> None:
    bench.executor.free()
    bench.executor.most_tokens = tokens

    async def one(n: int) -> None:
        with bench.admitted(bench.request(f"r{n}", (n, n + 1, 9), 12)) as stream:
            assert await drain(stream) == continuation([n, n + 1, 9], 12, END)

    await asyncio.gather(*(one(n) for n in range(8)))
    assert bench.executor.lost and bench.scheduler.counters.lost_steps == bench.executor.lost
    assert not bench.engine.failed.done()
    assert bench.scheduler.kv_manager.pool.num_free == bench.scheduler.config.num_blocks


async def test_memory_that_runs_out_while_a_step_computes_costs_nobody_a_token(bench: Bench) -> None:
    with bench.admitted(bench.request(max_tokens=8)) as stream:
        await bench.settle()
        bench.executor.allow()
        tokens = await stream.take()
        bench.executor.allow(MemoryExhausted("no memory"))
        bench.executor.free()
        assert tokens + await drain(stream) == continuation([5, 6, 7], 8, END)
    assert bench.scheduler.counters.lost_steps == 1


async def test_a_sequence_without_numbers_ends_alone_and_its_blocks_are_free(bench: Bench) -> None:
    bench.executor.broken_steps = range(3, 5)  # of which the second is in flight when the first is found out
    bench.executor.free()
    with (
        bench.admitted(bench.request("broken")) as broken,
        bench.admitted(bench.request("whole", (8, 9, 10, 11))) as whole,
    ):
        tokens = await drain(broken)
        assert broken.finish_reason is FinishReason.FAILED
        assert tokens == continuation([5, 6, 7], 8, END)[: len(tokens)]
        assert len(tokens) == len(broken.sequence.output) < 8
        rest = await drain(whole)
        assert rest == continuation([8, 9, 10, 11], 8, END)
    assert not bench.engine.failed.done()
    assert bench.scheduler.kv_manager.pool.num_free == bench.scheduler.config.num_blocks
    assert bench.scheduler.counters.generation_tokens == len(tokens) + len(rest)
    bench.scheduler.check_integrity()


async def test_a_device_without_memory_for_a_single_token_has_failed(bench: Bench) -> None:
    bench.executor.most_tokens = 0
    with bench.admitted(bench.request()) as stream, pytest.raises(DeviceError, match="no memory"):
        await drain(stream)
    assert bench.engine.failed.done()


async def test_an_engine_that_never_started_stops_as_well() -> None:
    await Bench().engine.shut_down()


@pytest.mark.parametrize("call", ["schedule", "take_ended", "update_from_output", "rollback"])
async def test_a_core_that_fails_ends_every_stream_and_refuses_new_ones(
    bench: Bench, call: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the books are wrong")

    with bench.admitted(bench.request()) as stream:
        if call in ("update_from_output", "rollback"):
            await bench.settle()
        monkeypatch.setattr(Controller, call, fail)
        bench.executor.allow(MemoryExhausted("no memory") if call == "rollback" else None)
        async with asyncio.timeout(240):
            with pytest.raises(DeviceError, match="the core failed"):
                await drain(stream)
    with pytest.raises(DeviceError), bench.admitted(bench.request("later")):
        pass
    (record,) = [record for record in caplog.records if record.levelname == "CRITICAL"]
    assert "the books are wrong" in str(record.exc_info)


# calibration


async def test_an_idle_engine_learns_from_a_step_behind_one_that_wakes_the_device(bench: Bench) -> None:
    bench.engine.calibrate()
    assert bench.engine.calibrating is not None
    bench.executor.free()
    while bench.engine.calibrating:
        await asyncio.sleep(0.001)
    assert bench.core.idle_calibration.num_steps == 1 and bench.core.step_time.is_calibrated
    assert not bench.scheduler.in_flight


async def test_a_request_that_comes_during_a_calibration_step_waits_for_that_step_alone(bench: Bench) -> None:
    bench.engine.calibrate()
    with bench.admitted(bench.request()) as stream:
        await bench.settle()
        assert not bench.scheduler.in_flight
        bench.executor.allow()
        while not bench.scheduler.in_flight:
            await asyncio.sleep(0.001)
        assert bench.engine.calibrating is None and bench.core.idle_calibration.num_steps == 0
        bench.executor.free()
        assert await drain(stream) == continuation([5, 6, 7], 8, END)


async def test_none_runs_while_somebody_has_a_request_or_where_none_is_to_run(bench: Bench) -> None:
    with bench.admitted(bench.request()):
        bench.engine.calibrate()
        assert bench.engine.calibrating is None
        await bench.settle()
        bench.executor.free()
    bench.core.calibrates = False
    while bench.scheduler.has_work:
        await asyncio.sleep(0.001)
    bench.engine.calibrate()
    assert bench.engine.calibrating is None


async def test_a_calibration_step_without_memory_is_forgotten(bench: Bench) -> None:
    bench.engine.calibrate()
    bench.executor.allow(MemoryExhausted("no memory"))
    while bench.engine.calibrating:
        await asyncio.sleep(0.001)
    bench.executor.free()
    with bench.admitted(bench.request()) as stream:
        assert await drain(stream) == continuation([5, 6, 7], 8, END)
    assert not bench.core.step_time.is_calibrated


async def test_a_device_that_fails_in_a_calibration_step_has_failed(bench: Bench) -> None:
    bench.engine.calibrate()
    bench.executor.allow(RuntimeError("CUDA error: an illegal memory access was encountered"))
    with pytest.raises(DeviceError, match="illegal memory access"):
        raise await bench.engine.failed


@pytest.mark.parametrize("call", ["calibrate", "calibrated", "calibration_batch", "next_job", "report"])
async def test_an_error_beside_the_steps_ends_every_stream_as_one_in_them_does(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("the books are wrong")

    monkeypatch.setattr("backend.engine.CALIBRATION_CHECK_SECONDS", 0.001)
    bench = Bench()
    if call.startswith("calibrat"):
        owner, name = (bench.engine, "_calibration_batch") if call == "calibration_batch" else (bench.core, call)
        monkeypatch.setattr(owner, name, fail)
    else:
        job = SideJob(tuple, fail, CpuStream())
        bench.engine.work_beside(SimpleNamespace(next_job=fail if call == "next_job" else lambda: job))
        bench.engine.side_work_soon()
    async with running(bench), asyncio.timeout(240):
        bench.executor.free()
        with pytest.raises(DeviceError, match="the core failed"):
            raise await bench.engine.failed
