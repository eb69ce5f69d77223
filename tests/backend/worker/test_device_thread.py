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
    """Tells of each launch; completes a step for each `complete`. Its threads stop with the test."""

    def __init__(self, depth: int = 2, runs_ahead: bool = True) -> None:
        self.runs_ahead = runs_ahead
        self.launches: SimpleQueue[int] = SimpleQueue()
        self.results: SimpleQueue[BaseException | None] = SimpleQueue()
        self.refusal: Exception | None = None  # raised for every launch
        self.outputs: SimpleQueue[StepOutput | BaseException] = SimpleQueue()
        self.thread = DeviceThread(self, self.outputs.put, depth)

    def __enter__(self) -> "Device":
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.thread.drain(PATIENCE)

    def launch(self, batch: Batch) -> Step:
        if self.refusal is not None:
            raise self.refusal
        self.launches.put(batch.step)
        return Step(batch.step, self.results)

    def submit(self, *numbers: int) -> None:
        for number in numbers:
            self.thread.submit(Batch(number))

    def launched(self) -> int:
        """Wait for the next launch; returns its number."""
        return self.launches.get(timeout=PATIENCE)

    def complete(self, error: BaseException | None = None) -> None:
        self.results.put(error)

    def posted(self) -> StepOutput | BaseException:
        return self.outputs.get(timeout=PATIENCE)

    def steps(self, count: int) -> list[int]:
        """The numbers of the next outputs, none of which is an error."""
        outputs = [self.posted() for _ in range(count)]
        return [output.step for output in outputs if isinstance(output, StepOutput)]


EITHER_KIND = pytest.mark.parametrize("runs_ahead", [True, False], ids=["two threads", "one thread"])


@EITHER_KIND
@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_come_in_the_order_of_the_steps(depth: int, runs_ahead: bool) -> None:
    with Device(depth, runs_ahead) as device:
        for number in range(20):
            device.submit(number)
            device.complete()
    assert device.steps(20) == list(range(20))


def test_a_step_that_is_planned_while_another_runs_is_launched_at_once() -> None:
    with Device() as device:
        device.submit(0)
        assert device.launched() == 0
        device.submit(1)  # nothing has completed, and somebody may be waiting for step 0
        assert device.launched() == 1
        device.complete()
        device.complete()


@EITHER_KIND
def test_no_more_steps_are_launched_than_may_be_in_flight(runs_ahead: bool) -> None:
    with Device(1, runs_ahead) as device:
        device.submit(0, 1)
        assert device.launched() == 0
        assert device.launches.empty()
        device.complete()
        assert device.launched() == 1
        device.complete()


def test_two_steps_are_in_flight_and_no_third() -> None:
    with Device() as device:
        device.submit(0, 1, 2)
        assert [device.launched(), device.launched()] == [0, 1]
        assert device.launches.empty()
        device.complete()
        assert device.launched() == 2
        device.complete()
        device.complete()


def test_where_nothing_runs_ahead_one_thread_launches_each_step_and_waits_for_it() -> None:
    with Device(runs_ahead=False) as device:
        device.submit(0, 1)
        assert device.launched() == 0
        assert device.launches.empty()
        assert device.thread.stacks().startswith("sluice-device:\n")
        device.complete()
        assert device.launched() == 1
        device.complete()
    assert device.steps(2) == [0, 1]


@EITHER_KIND
def test_a_failure_is_posted_once_and_ends_the_threads(runs_ahead: bool) -> None:
    with Device(runs_ahead=runs_ahead) as device:
        device.submit(0, 1, 2)
        device.complete(RuntimeError("first"))
        device.complete(RuntimeError("second"))
        assert str(device.posted()) == "first"
    assert device.outputs.empty()


@EITHER_KIND
def test_a_launch_that_fails_is_posted_after_the_steps_before_it(runs_ahead: bool) -> None:
    with Device(runs_ahead=runs_ahead) as device:
        device.submit(0)
        assert device.launched() == 0
        device.complete()
        assert device.steps(1) == [0]
        device.refusal = RuntimeError("CUDA error: an illegal memory access")
        device.submit(1)
        assert "illegal memory access" in str(device.posted())


@EITHER_KIND
@pytest.mark.parametrize("depth", [1, 2])
def test_a_step_that_is_lost_takes_those_behind_it_with_it_until_it_comes_again(depth: int, runs_ahead: bool) -> None:
    with Device(depth, runs_ahead) as device:
        device.submit(0, 1, 2)
        device.complete()
        device.complete(MemoryExhausted("step 1"))
        assert device.steps(1) == [0]
        assert isinstance(device.posted(), MemoryExhausted)
        for number in (1, 2):
            device.submit(number)
            device.complete()
    assert device.steps(2) == [1, 2]
    assert device.outputs.empty()


@EITHER_KIND
def test_a_step_that_finds_no_memory_at_its_launch_is_lost_after_those_before_it(runs_ahead: bool) -> None:
    with Device(runs_ahead=runs_ahead) as device:
        device.submit(0)
        assert device.launched() == 0
        device.refusal = MemoryExhausted("step 1")
        device.submit(1)
        assert device.outputs.empty()
        device.complete()
        assert device.steps(1) == [0]
        assert isinstance(device.posted(), MemoryExhausted)
        device.refusal = None
        device.submit(1)
        assert device.launched() == 1
        device.complete()
        assert device.steps(1) == [1]


@EITHER_KIND
@pytest.mark.parametrize("is_refused", [True, False], ids=["at its launch", "while it runs"])
def test_a_calibration_step_that_is_lost_takes_no_planned_step_with_it(is_refused: bool, runs_ahead: bool) -> None:
    with Device(runs_ahead=runs_ahead) as device:
        device.submit(7)
        device.complete()
        assert device.steps(1) == [7]
        for _ in range(2):
            device.refusal = MemoryExhausted("calibration") if is_refused else None
            device.thread.submit(Batch(0, stores=False))
            if not is_refused:
                device.complete(MemoryExhausted("calibration"))
            assert isinstance(device.posted(), MemoryExhausted)
        device.refusal = None
        for number in (8, 9):
            device.submit(number)
            device.complete()
        assert device.steps(2) == [8, 9]


@EITHER_KIND
def test_a_device_that_is_stuck_is_told(runs_ahead: bool) -> None:
    with Device(runs_ahead=runs_ahead) as device:
        device.submit(0)
        assert device.launched() == 0
        assert not device.thread.drain(timeout=0.01)
        device.complete()
