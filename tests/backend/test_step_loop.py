"""When the loop launches a step: at once, or as late as the device does not wait for it."""

import asyncio

import pytest

from admission.core import CoreConfig, make_core
from backend.engine import Engine
from backend.scheduler.batch import StepOutput
from backend.scheduler.scheduler import Scheduler
from backend.scheduler.waiting_queue import FirstComeFirstServed, HoldingQueue
from backend.step_loop import FIRST_LEAD_S, LAUNCH_S, StepLoop
from backend.worker.simulated import SimulatedExecutor
from tests.backend.scheduler.bench import make_config
from tests.backend.sequences import make_sequence

STEP_S = 1.0


class Served:
    """One answer on a device whose steps take a second, on a clock that the test moves."""

    def __init__(self, is_late: bool = True) -> None:
        self.now = self.done_at = 0.0
        self.launched: list[int] = []
        self.core = Scheduler(make_config(), HoldingQueue(FirstComeFirstServed()))
        self.core.add(make_sequence("one", "t", 4, 30))
        remaining = (lambda now: self.done_at - now) if is_late else None
        self.loop = StepLoop(self.core, self._launch, lambda: self.now, remaining)
        self.loop.schedule()

    def _launch(self, batch: object) -> None:
        self.launched.append(self.core.in_flight[-1].batch.step)
        self.done_at = max(self.done_at, self.now) + STEP_S

    def wake(self) -> None:
        """Let the time pass until the loop wants to plan again."""
        seconds = self.loop.seconds_to_wake()
        assert seconds is not None
        self.now += seconds
        self.loop.schedule()

    def complete(self, at: float) -> None:
        self.now = at
        batch = self.core.in_flight[0].batch
        self.loop.step(StepOutput(batch.step, [5] * len(batch.sampled), STEP_S))


def test_two_steps_are_launched_at_once_where_nobody_says_how_long_they_take() -> None:
    served = Served(is_late=False)
    assert served.launched == [0, 1] and served.loop.seconds_to_wake() is None


def test_the_next_step_is_launched_a_lead_before_the_end_of_the_one_that_runs() -> None:
    served = Served()
    assert served.launched == [0], "a request that comes now is in the next step"
    assert served.loop.seconds_to_wake() == pytest.approx(STEP_S - FIRST_LEAD_S)
    served.wake()
    assert served.launched == [0, 1] and served.loop.seconds_to_wake() is None
    served.complete(STEP_S)
    assert served.launched == [0, 1] and served.loop.seconds_to_wake() == pytest.approx(STEP_S - FIRST_LEAD_S)


def test_the_lead_shrinks_while_the_device_never_waits_and_grows_when_it_has_waited() -> None:
    served = Served()
    served.wake()
    served.complete(STEP_S)
    shrunk = served.loop.lead
    assert LAUNCH_S < shrunk < FIRST_LEAD_S
    served.complete(2 * STEP_S)
    assert shrunk < served.loop.lead <= FIRST_LEAD_S and served.launched == [0, 1, 2], "it ended before it was expected"
    for step in range(3, 28):
        served.wake()
        served.loop.lead = LAUNCH_S
        served.complete(step * STEP_S)
        assert served.loop.lead >= LAUNCH_S


async def test_an_engine_that_launches_late_serves_all_that_is_asked() -> None:
    core = make_core(CoreConfig(), make_config(num_blocks=64))
    engine = Engine(core, SimulatedExecutor(lambda batch: 1e-3), launches_late=True)
    engine.start()
    streams = [engine.submit(make_sequence(str(n), "t", 4, 12, (), arrival=engine.clock())) for n in range(6)]
    for stream in streams:
        while stream.finish_reason is None:
            await asyncio.wait_for(stream.take(), 30)
    await engine.stop()
    assert [len(stream.sequence.output) for stream in streams] == [12] * 6
