"""The engine on the event loop: hands planned steps to the device thread and its tokens to the streams."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Protocol

from backend.errors import DeviceError, MemoryExhausted
from backend.scheduler.batch import NO_TOKEN, Batch, StepOutput
from backend.scheduler.scheduled_step import Delta
from backend.scheduler.sequence import FinishReason, Sequence
from backend.stream import Delivery, TokenStream
from backend.worker.device_thread import DeviceThread
from backend.worker.executor import Executor

log = logging.getLogger(__name__)

STOP_SECONDS = 10.0  # for the steps in flight of an engine that is stopped
ABANDON_SECONDS = 1.0  # the same, after a failure: they may never end
CORE_FAILED = "the core failed"  # a step that is half accounted for cannot be gone back to


class Core(Protocol):
    """Who decides. Synchronous and pure: time comes in with each call, in seconds of the engine's clock."""

    def arrive(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence, or raise a typed refusal and keep nothing of it."""
        ...

    def finish(self, sequence: Sequence, reason: FinishReason, now: float) -> None: ...

    def plan(self, now: float) -> Batch | None: ...

    def allow(self, tenant: str, blocks: int | None, now: float) -> None:
        """The tenant may hold this many blocks from now on; None: any number."""
        ...

    def extend(self, sequence: Sequence, tokens: int, now: float) -> None:
        """The sequence may generate this many tokens more than so far."""
        ...

    def take_ended(self) -> list[Sequence]:
        """Sequences that planning has ended."""
        ...

    def complete(self, output: StepOutput, now: float) -> list[Delta]: ...

    def lost(self, now: float) -> bool:
        """The device had no memory for the oldest step in flight: it and those behind it are as if never planned.

        False when nothing less can be planned in their place.
        """
        ...


class Engine:
    """Runs a core's plans on an executor, up to two steps ahead.

    Owned by one event loop: every method is called there. On a completed step it accounts, plans and submits before any
    token is delivered. A step for which the device has no memory is planned again with less. After any other failure of
    the device or of the core every stream raises `DeviceError`, and so does `submit`; `failed` is set.
    """

    def __init__(
        self, core: Core, executor: Executor, steps_in_flight: int = 2, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.core = core
        self.clock = clock
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[DeviceError] = self._loop.create_future()
        self._streams: dict[Sequence, TokenStream] = {}
        self._delivery = Delivery(self._loop.call_soon)
        self._device = DeviceThread(executor, self._post, steps_in_flight)
        self._planning = False

    def start(self) -> None:
        self._device.start()

    async def stop(self) -> None:
        """Finish the steps in flight and end the device thread. Streams still open end with `DeviceError`."""
        seconds = ABANDON_SECONDS if self.failed.done() else STOP_SECONDS
        self.fail(DeviceError("the engine was stopped"))
        await asyncio.to_thread(self._device.stop, seconds)

    @property
    def num_streams(self) -> int:
        return len(self._streams)

    def submit(self, sequence: Sequence) -> TokenStream:
        """Queue a sequence and return its stream; the core may refuse it with an error of its own."""
        if self.failed.done():
            raise self.failed.result()
        self.core.arrive(sequence, self.clock())
        stream = self._streams[sequence] = TokenStream(sequence)
        self._plan_soon()
        return stream

    def finish(self, sequence: Sequence, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """End a sequence in any state, once; its stream gets no token after this."""
        if self._streams.pop(sequence, None) is not None:
            self.core.finish(sequence, reason, self.clock())
            self._plan_soon()

    def fail(self, error: DeviceError) -> None:
        """End every stream with `error`, and plan no more."""
        if not self.failed.done():
            self.failed.set_result(error)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    def device_stacks(self) -> str:
        """Where the threads at the device are, for a report on one that does not come back."""
        return self._device.stacks()

    def allow(self, tenant: str, blocks: int | None) -> None:
        """Change what a tenant may hold of the KV memory; None: there is no limit."""
        self.core.allow(tenant, blocks, self.clock())
        self._plan_soon()

    def extend(self, sequence: Sequence, tokens: int) -> None:
        """Let a sequence generate more tokens than it was allowed so far."""
        self.core.extend(sequence, tokens, self.clock())
        self._plan_soon()

    def _plan_soon(self) -> None:
        """Plan after the callbacks that are due now, so that requests which arrive together start together."""
        if not self._planning:
            self._planning = True
            self._loop.call_soon(self._plan_now)

    def _plan_now(self) -> None:
        self._planning = False
        try:
            self._submit_plans()
        except Exception as error:
            log.critical(CORE_FAILED, exc_info=error)
            self.fail(DeviceError(CORE_FAILED))

    def _submit_plans(self) -> None:
        if self.failed.done():
            return
        now = self.clock()
        while (batch := self.core.plan(now)) is not None:
            self._device.submit(batch)
        for sequence in self.core.take_ended():
            if (stream := self._streams.pop(sequence, None)) is not None:
                stream.end(sequence.finish_reason or FinishReason.PREEMPTED)

    def _post(self, result: StepOutput | BaseException) -> None:
        """On the device thread: the step's one crossing to the loop."""
        try:
            self._loop.call_soon_threadsafe(self._on_step, result)
        except RuntimeError:
            log.debug("a step completed after the event loop had closed")

    def _on_step(self, result: StepOutput | BaseException) -> None:
        try:
            self._account(result)
        except Exception as error:
            log.critical(CORE_FAILED, exc_info=error)
            self.fail(DeviceError(CORE_FAILED))

    def _account(self, result: StepOutput | BaseException) -> None:
        if isinstance(result, MemoryExhausted) and not self.failed.done() and self.core.lost(self.clock()):
            log.warning("a step is planned again with less: %s", result)
            self._submit_plans()
            return
        if isinstance(result, BaseException):
            log.error("device failure", exc_info=result)
            self.fail(DeviceError(f"the device failed: {result}"))
            return
        if self.failed.done():
            return
        deltas = self.core.complete(result, self.clock())
        if NO_TOKEN in result.token_ids:
            self._fail_rows(deltas)
        self._submit_plans()
        for sequence, token_id, reason in deltas:
            stream = self._streams.get(sequence)
            if stream is None:
                continue
            if stream.put(token_id, reason):
                self._delivery.add(stream)
            if reason is not None:
                del self._streams[sequence]
        self._delivery.flush()

    def _fail_rows(self, deltas: list[Delta]) -> None:
        """End the sequences for which the model computed no numbers; those beside them are served on."""
        for sequence in [sequence for sequence, token_id, _ in deltas if token_id == NO_TOKEN]:
            log.error("the model computed no numbers for %s: its weights or its dtype are at fault", sequence.id)
            self.core.finish(sequence, FinishReason.FAILED, self.clock())
            if (stream := self._streams.pop(sequence, None)) is not None:
                stream.end(FinishReason.FAILED)
