import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from admission.core import PRIOR_STEP_TIME, CoreConfig, make_core
from admission.step_times.step_time import StepTime, StepTimeModel
from backend.calibration_steps import CalibrationStep
from backend.engine import Engine
from backend.errors import DeviceError
from backend.sampling_params import SamplingParams
from backend.scheduler.sequence import PromptRequest, Sequence
from gateway.watchdog import CHECK_SECONDS, Watchdog
from tests.backend.scheduler.bench import make_config
from tests.backend.stepped_engine import SteppedExecutor

TIMEOUT = 10.0
LOOKS = round(TIMEOUT / CHECK_SECONDS)


class Bench:
    """An engine on a device whose steps complete when the test says so, and its watchdog."""

    def __init__(self, prior: StepTime) -> None:
        config = make_config()
        step_time = StepTimeModel(prior)
        self.executor = SteppedExecutor(config.block_size)
        self.core = make_core(CoreConfig(), config, step_time)
        self.engine = Engine(self.core, self.executor)
        self.watchdog = Watchdog(self.engine, self.core, TIMEOUT, self.engine.clock)
        self.stream = self.engine.submit(
            Sequence(PromptRequest("r", "acme", [5, 6, 7], SamplingParams(), 8, 0, frozenset()))
        )

    def look(self, times: int, elapsed: float = CHECK_SECONDS) -> bool:
        """Whether the engine has failed after a number of looks."""
        for _ in range(times):
            self.watchdog.check(elapsed)
        return self.engine.failed.done()

    async def complete_a_step(self) -> None:
        done = len(self.stream.sequence.output)
        self.executor.allow()
        while len(self.stream.sequence.output) == done:
            await asyncio.sleep(0.001)


@asynccontextmanager
async def watched(prior: StepTime = PRIOR_STEP_TIME) -> AsyncIterator[Bench]:
    bench = Bench(prior)
    bench.engine.start()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    try:
        yield bench
    finally:
        bench.executor.free()
        await bench.engine.shut_down()


async def test_a_step_that_does_not_come_back_fails_the_engine_and_every_stream(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with watched() as bench:
        while ", in _wait\n" not in bench.engine.device_stacks():
            await asyncio.sleep(0.001)
        assert not bench.look(LOOKS)
        assert bench.look(1)
        with pytest.raises(DeviceError, match="no step was completed for 10 s"):
            await bench.stream.take()
        bench.look(LOOKS)
    (report,) = [record for record in caplog.records if record.levelno == logging.CRITICAL]
    assert "the device is wedged: step 0 of 1 sequences" in report.getMessage()
    assert "sluice-device-launch:" in report.getMessage() and "sluice-device-wait:" in report.getMessage()
    assert ", in _wait\n" in report.getMessage()


async def test_each_step_has_its_own_time() -> None:
    async with watched() as bench:
        for _ in range(4):
            assert not bench.look(LOOKS)
            await bench.complete_a_step()


async def test_an_idle_device_is_not_held_to_anything() -> None:
    async with watched() as bench:
        while bench.core.scheduler.in_flight:
            bench.executor.allow()
            await asyncio.sleep(0.001)
        assert not bench.look(5 * LOOKS)


async def test_a_step_that_was_predicted_to_be_slow_has_twenty_times_as_long() -> None:
    async with watched(StepTime((2.0, 0, 0, 0, 0, 0, 0))) as bench:
        assert not bench.look(3 * LOOKS)
        assert bench.look(LOOKS + 1)


async def test_time_in_which_the_machine_stood_still_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    async with watched() as bench:
        assert not bench.look(2, elapsed=3600.0)
        await bench.complete_a_step()
        assert not bench.look(LOOKS)
    assert "the event loop was late by 3599.8 s" in caplog.text


async def test_a_calibration_step_that_does_not_come_back_fails_the_engine(caplog: pytest.LogCaptureFixture) -> None:
    async with watched() as bench:
        bench.executor.free()
        while bench.core.in_flight or bench.stream.finish_reason is None:
            bench.stream.rest()
            await asyncio.sleep(0.001)
        bench.engine.calibrating = CalibrationStep(num_decodes=4, context=16)
        assert not bench.look(LOOKS)
        assert bench.look(1)
    assert "a step of 4 tokens, for its time, has not come back" in caplog.text
