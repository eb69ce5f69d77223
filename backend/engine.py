"""The engine on the event loop: it passes planned steps to the device thread, and sampled tokens to the streams."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Protocol

from backend.calibration_steps import CalibrationStep, CalibrationTimes
from backend.errors import DeviceError, MemoryExhausted
from backend.scheduler.batch import Batch, StepOutput
from backend.scheduler.scheduled_step import NewToken
from backend.scheduler.sequence import FinishReason, Sequence
from backend.step_loop import Core, StepLoop
from backend.stream import Delivery, TokenStream
from backend.worker.device_thread import DeviceThread
from backend.worker.executor import Executor
from backend.worker.side_job import SideJob

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0  # for the steps in flight of an engine that is stopped
CALIBRATION_CHECK_SECONDS = 1.0  # between two checks whether a calibration step is due
ABANDON_SECONDS = 1.0  # the same as STOP_SECONDS, after a failure: the steps may never end
_STEP_RESULTS = (StepOutput, MemoryExhausted)


CORE_FAILED = "the core failed"  # a step that is half accounted for cannot be repeated


class ServingCore(Core, Protocol):
    """A core that requests reach while it runs."""

    def arrive(self, sequence: Sequence, now: float) -> object:
        """Queue a sequence, or raise a typed refusal and keep no trace of it."""
        ...

    def take_ended(self) -> list[Sequence]:
        """Return the sequences that the core itself has ended since the last call."""
        ...

    def calibrate(self, now: float) -> CalibrationStep | None:
        """Return a calibration step to run if there is nothing else to do; no step is planned until `calibrated`."""
        ...

    def calibrated(self, measured: CalibrationTimes, now: float) -> None:
        """Learn the seconds of calibration steps; a step that is not among them was lost."""
        ...


class SideWork(Protocol):
    """Jobs for the device beside the steps."""

    def next_job(self) -> SideJob[Any] | None:
        """Return the job to run now; None: none is due."""
        ...


class Engine:
    """Runs a core's plans on an executor, up to two steps ahead.

    One event loop owns it: every method is called there. On a completed step it accounts, plans and submits before any
    token is delivered. A step for which the device has no memory is planned again with less. After any other failure of
    the device or of the core every stream raises `DeviceError`, and so does `submit`; `failed` is set.

    While there are no requests, calibration steps run now and then, one at a time: a new request waits for one at most.
    """

    def __init__(
        self,
        core: ServingCore,
        executor: Executor,
        steps_in_flight: int = 2,
        clock: Callable[[], float] = time.monotonic,
        calibration_batch: Callable[[CalibrationStep], Batch] | None = None,
    ) -> None:
        """`calibration_batch` makes the batch of a calibration step; without it no calibration step is run."""
        self.core = core
        self.clock = clock
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[DeviceError] = self._loop.create_future()
        self._streams: dict[Sequence, TokenStream] = {}
        self._delivery = Delivery(self._loop.call_soon)
        self._device = DeviceThread(executor, self._post, steps_in_flight)
        self._steps = StepLoop(core, self._device.submit, clock)
        self._is_scheduling = False
        self._wake: asyncio.TimerHandle | None = None  # to plan again, if no event comes before
        self._calibration_batch = calibration_batch
        self.calibrating: CalibrationStep | None = None  # the calibration step in flight
        self._has_warmed = False  # a first run of the step in flight has warmed the device
        self._side_work: SideWork | None = None  # asked once a step, and by `side_work_soon`
        self._has_side_job = False  # a job is in flight: one at a time
        self._is_asking_side_work = False

    def start(self) -> None:
        self._device.start()
        if self._calibration_batch is not None:
            self._loop.call_later(CALIBRATION_CHECK_SECONDS, self._guarded, self._calibrate_now_and_then)

    async def shut_down(self) -> None:
        """Finish the steps in flight and end the device thread. Streams still open end with `DeviceError`."""
        seconds = ABANDON_SECONDS if self.failed.done() else STOP_SECONDS
        self.fail(DeviceError("the engine was stopped"))
        await asyncio.to_thread(self._device.drain, seconds)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    @property
    def sequences(self) -> Iterable[Sequence]:
        """The sequences that have not ended, waiting or running."""
        return self._streams.keys()

    def submit(self, sequence: Sequence, make_stream: Callable[[Sequence], TokenStream] = TokenStream) -> TokenStream:
        """Queue a sequence and return the stream of its tokens; the caller ends it with `finish`, on every path.

        Raises `DeviceError` when the engine has failed, and the core's refusals.
        """
        if self.failed.done():
            raise self.failed.result()
        self.core.arrive(sequence, self.clock())
        stream = self._streams[sequence] = make_stream(sequence)
        self.schedule_soon()
        return stream

    def finish_sequence(self, sequence: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a sequence in any state, once; its stream gets no token after this."""
        if self._streams.pop(sequence, None) is not None:
            self.core.finish_sequence(sequence, reason, self.clock())
            self.schedule_soon()

    def fail(self, error: DeviceError) -> None:
        """End every stream with `error`, and plan no more."""
        if not self.failed.done():
            self.failed.set_result(error)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    def fail_soon(self, error: DeviceError) -> None:
        """Call `fail` from another thread."""
        with suppress(RuntimeError):  # the event loop has closed
            self._loop.call_soon_threadsafe(self.fail, error)

    def device_stacks(self) -> str:
        """Return the stacks of the device's threads, for a report on a thread that does not return."""
        return self._device.stacks()

    def schedule_soon(self) -> None:
        """Plan after the callbacks that are due now, so that requests which arrive together start together."""
        if not self._is_scheduling:
            self._is_scheduling = True
            self._loop.call_soon(self._guarded, self._schedule)

    def work_beside(self, side_work: SideWork) -> None:
        """Run the jobs of `side_work` beside the steps, one at a time."""
        self._side_work = side_work

    def side_work_soon(self) -> None:
        """Ask for side work after the callbacks that are due now."""
        if not self._is_asking_side_work:
            self._is_asking_side_work = True
            self._loop.call_soon(self._guarded, self._ask_side_work)

    def _ask_side_work(self) -> None:
        self._is_asking_side_work = False
        if self._side_work is None or self._has_side_job or self.calibrating is not None or self.failed.done():
            return
        if (job := self._side_work.next_job()) is not None:
            self._has_side_job = True
            self._device.submit(job)

    def _schedule(self) -> None:
        self._is_scheduling = False
        if not self.failed.done():
            self._step(None)

    def _post(self, result: StepOutput | SideJob[Any] | BaseException) -> None:
        """Post a step's output to the event loop: called on the device thread, once a step."""
        try:
            self._loop.call_soon_threadsafe(self._guarded, self._on_step, result)
        except RuntimeError:
            log.debug("a step completed after the event loop had closed")

    def _on_step(self, result: StepOutput | SideJob[Any] | BaseException) -> None:
        if isinstance(result, SideJob):
            self._has_side_job = False
            result.report()
            self._ask_side_work()
        elif not isinstance(result, _STEP_RESULTS):
            self._device_failed(result)
        elif not self.failed.done():
            if self.calibrating is None:
                self._step(result)
            else:
                self._calibrated(self.calibrating, result)
            self._ask_side_work()

    def _guarded(self, part: Callable[..., None], *given: object) -> None:
        """Run one callback of the event loop; an error ends the engine, whose state would otherwise be half changed."""
        try:
            part(*given)
        except MemoryExhausted as error:
            self._device_failed(error)
        except Exception as error:
            log.critical(CORE_FAILED, exc_info=error)
            self.fail(DeviceError(CORE_FAILED))

    def _step(self, output: StepOutput | MemoryExhausted | None) -> None:
        """Account for a step's output, if there is one, launch the steps that may follow, deliver its tokens, and end
        the streams of sequences that the core gave up.
        """
        if output is None:
            self._steps.schedule()
        else:
            self._deliver(self._steps.step(output))
        if self._wake is not None or self.core.wakes_at is not None:
            self._wake_in_time()
        for sequence in self.core.take_ended():
            if (stream := self._streams.pop(sequence, None)) is not None:
                stream.end(sequence.finish_reason or FinishReason.PREEMPTED)

    def _wake_in_time(self) -> None:
        """Have the core plan at the time that it tells, unless a step ends before."""
        if self._wake is not None:
            self._wake.cancel()
        seconds = self._steps.seconds_to_wake()
        self._wake = None if seconds is None else self._loop.call_later(seconds, self._guarded, self._schedule)

    def _calibrate_now_and_then(self) -> None:
        if not self.failed.done():
            self.calibrate()
            self._loop.call_later(CALIBRATION_CHECK_SECONDS, self._guarded, self._calibrate_now_and_then)

    def calibrate(self) -> None:
        """Run a calibration step, if one is due and there is no request."""
        if not (self._streams or self._has_side_job) and (step := self.core.calibrate(self.clock())) is not None:
            self._has_warmed = False
            self._launch_calibration(step)

    def _launch_calibration(self, step: CalibrationStep) -> None:
        assert self._calibration_batch is not None
        self.calibrating = step
        self._device.submit(self._calibration_batch(step))

    def _calibrated(self, step: CalibrationStep, result: StepOutput | MemoryExhausted) -> None:
        """Run the step again if the first run woke the device and no request has come; else tell the core its time."""
        self.calibrating = None
        is_measured = isinstance(result, StepOutput)
        if is_measured and not (self._has_warmed or self._streams or self._has_side_job):
            self._has_warmed = True
            self._launch_calibration(step)
            return
        measured = [(step, result.elapsed)] if isinstance(result, StepOutput) and self._has_warmed else []
        self.core.calibrated(measured, self.clock())
        self._step(None)

    def _device_failed(self, error: BaseException) -> None:
        log.error("device failure", exc_info=error)
        self.fail(DeviceError(f"the device failed: {error}"))

    def _deliver(self, new_tokens: list[NewToken]) -> None:
        for sequence, token_id, reason in new_tokens:
            stream = self._streams.get(sequence)
            if stream is None:
                continue
            if token_id < 0:
                stream.end(reason or FinishReason.FAILED)
            elif (reason is not None or len(sequence.output) >= stream.due) and stream.put(reason):
                self._delivery.add(stream)
            if reason is not None:
                del self._streams[sequence]
        self._delivery.flush()
