"""The device's threads, over an executor whose steps complete when the test says so."""

from queue import SimpleQueue

import pytest

from backend.errors import MemoryExhausted
from backend.scheduler.batch import Batch, StepOutput
from backend.worker.device_thread import DeviceThread

PATIENCE = 240.0  # seconds before a test that hangs fails


class Step:
    def __init__(self, number: int, result: "SimpleQueue[BaseException | None]") -> None:
        self.number, self.result = number, result

    def wait(self) -> StepOutput:
        error = self.result.get(timeout=PATIENCE)
        if error is not None:
            raise error
        return StepOutput(self.number, [], 0.0)


class Device:
    """Tells of each launch; completes a step for each `complete`."""

    def __init__(self) -> None:
        self.launches: SimpleQueue[int] = SimpleQueue()
        self.results: SimpleQueue[BaseException | None] = SimpleQueue()
        self.refusal: Exception | None = None  # of whatever is launched

    def launch(self, batch: Batch) -> Step:
        if self.refusal is not None:
            raise self.refusal
        self.launches.put(batch.step)
        return Step(batch.step, self.results)

    def complete(self, error: BaseException | None = None) -> None:
        self.results.put(error)


class Bench:
    def __init__(self, depth: int = 2) -> None:
        self.device = Device()
        self.posted: SimpleQueue[StepOutput | BaseException] = SimpleQueue()
        self.thread = DeviceThread(self.device, self.posted.put, depth)
        self.thread.start()


@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_come_in_the_order_of_the_steps(depth: int) -> None:
    bench = Bench(depth)
    for number in range(20):
        bench.thread.submit(Batch(number))
        bench.device.complete()
    assert bench.thread.stop(PATIENCE)
    outputs = [bench.posted.get(timeout=PATIENCE) for _ in range(20)]
    assert [output.step for output in outputs if isinstance(output, StepOutput)] == list(range(20))


def test_a_step_that_is_planned_while_another_runs_is_launched_at_once() -> None:
    bench = Bench()
    bench.thread.submit(Batch(0))
    assert bench.device.launches.get(timeout=PATIENCE) == 0
    bench.thread.submit(Batch(1))  # nothing has completed, and somebody may be waiting for step 0
    assert bench.device.launches.get(timeout=PATIENCE) == 1
    bench.device.complete()
    bench.device.complete()
    assert bench.thread.stop(PATIENCE)


def test_no_more_steps_are_launched_than_may_be_in_flight() -> None:
    bench = Bench(depth=1)
    bench.thread.submit(Batch(0))
    bench.thread.submit(Batch(1))
    assert bench.device.launches.get(timeout=PATIENCE) == 0
    assert bench.device.launches.empty()
    bench.device.complete()
    assert bench.device.launches.get(timeout=PATIENCE) == 1
    bench.device.complete()
    assert bench.thread.stop(PATIENCE)


def test_a_failure_is_posted_once_and_ends_both_threads() -> None:
    bench = Bench()
    for number in range(3):
        bench.thread.submit(Batch(number))
    bench.device.complete(RuntimeError("first"))
    bench.device.complete(RuntimeError("second"))
    error = bench.posted.get(timeout=PATIENCE)
    assert str(error) == "first"
    assert bench.thread.stop(PATIENCE)
    assert bench.posted.empty()


def test_a_launch_that_fails_is_posted_after_the_steps_before_it() -> None:
    bench = Bench()
    bench.thread.submit(Batch(0))
    assert bench.device.launches.get(timeout=PATIENCE) == 0
    bench.device.complete()
    assert isinstance(bench.posted.get(timeout=PATIENCE), StepOutput)
    bench.device.refusal = RuntimeError("CUDA error: an illegal memory access")
    bench.thread.submit(Batch(1))
    assert "illegal memory access" in str(bench.posted.get(timeout=PATIENCE))
    assert bench.thread.stop(PATIENCE)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_is_lost_takes_those_behind_it_with_it_until_it_comes_again(depth: int) -> None:
    bench = Bench(depth)
    for number in range(3):
        bench.thread.submit(Batch(number))
    bench.device.complete()
    bench.device.complete(MemoryExhausted("step 1"))
    assert isinstance(bench.posted.get(timeout=PATIENCE), StepOutput)
    assert isinstance(bench.posted.get(timeout=PATIENCE), MemoryExhausted)
    for number in (1, 2):
        bench.thread.submit(Batch(number))
        bench.device.complete()
    assert bench.thread.stop(PATIENCE)
    again = [bench.posted.get(timeout=PATIENCE) for _ in range(2)]
    assert [output.step for output in again if isinstance(output, StepOutput)] == [1, 2]
    assert bench.posted.empty()


def test_a_step_that_finds_no_memory_at_its_launch_is_lost_after_those_before_it() -> None:
    bench = Bench()
    bench.thread.submit(Batch(0))
    assert bench.device.launches.get(timeout=PATIENCE) == 0
    bench.device.refusal = MemoryExhausted("step 1")
    bench.thread.submit(Batch(1))
    assert bench.posted.empty()
    bench.device.complete()
    assert isinstance(bench.posted.get(timeout=PATIENCE), StepOutput)
    assert isinstance(bench.posted.get(timeout=PATIENCE), MemoryExhausted)
    bench.device.refusal = None
    bench.thread.submit(Batch(1))
    assert bench.device.launches.get(timeout=PATIENCE) == 1
    bench.device.complete()
    assert isinstance(bench.posted.get(timeout=PATIENCE), StepOutput)
    assert bench.thread.stop(PATIENCE)


def test_a_device_that_is_stuck_is_told() -> None:
    bench = Bench()
    bench.thread.submit(Batch(0))
    assert bench.device.launches.get(timeout=PATIENCE) == 0
    assert not bench.thread.stop(timeout=0.01)
    bench.device.complete()
    assert bench.thread.stop(PATIENCE)
