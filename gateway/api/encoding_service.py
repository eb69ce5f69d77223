"""Runs encoder batches on the engine's device, between its steps.

A tenant's batch runs once its weighted service is no more than that of the tenants in the steps in flight, or its part
of the time is due (`EncodingQueue.may_go`); the batch is charged like a step. Inputs of the spare class, lines of
batches, are encoded while the device has no other work, and take turns with its other sequences by the accounts of that
class.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Protocol

from admission.controller import Controller
from admission.encoding import BatchInput, BatchTime, EncodingLimits, EncodingQueue, EncodingRequest
from admission.spare import SPARE_STEP_S
from backend.engine import Engine
from backend.errors import DeviceError
from backend.worker.side_job import SideJob, WorkStream
from gateway.api.engine_client import EncodingAsk
from gateway.errors import DeadlineExceeded, DeadlineUnmeetable, InternalError, ModelFailed, Overloaded

log = logging.getLogger(__name__)

Vector = bytes  # of 32-bit floats


class EncoderRunner(Protocol):
    """An encoder: it turns each input's token ids into a vector."""

    @property
    def stream(self) -> WorkStream:
        """The device stream that it runs on."""
        ...

    @property
    def measured(self) -> Sequence[tuple[int, float]]:
        """Token counts and seconds of the batches that were measured at startup."""
        ...

    def vectors(self, inputs: Sequence[Sequence[int]]) -> list[Vector | None]:
        """Return the vector of each input; None where it is not finite. Called on a device thread."""
        ...


class Waiting:
    """One request's inputs, and the vectors computed so far."""

    def __init__(self, inputs: Sequence[Sequence[int]]) -> None:
        self.inputs = inputs
        self.vectors: list[Vector | None] = [None] * len(inputs)
        self.num_missing = len(inputs)
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class EncodingService:
    """The encoders of one engine, each with a queue of its own. It belongs to the engine's event loop."""

    def __init__(
        self, encoders: Mapping[str, EncoderRunner], engine: Engine, core: Controller, limits: EncodingLimits
    ) -> None:
        self._engine, self._core, self._encoders = engine, core, encoders
        self.queues: dict[str, EncodingQueue] = {}
        self.spare_queues: dict[str, EncodingQueue] = {}
        short = limits._replace(longest_wait_s=0.0, beside_s=SPARE_STEP_S, alone_s=SPARE_STEP_S)
        for name, encoder in encoders.items():
            batch_time = BatchTime()
            for tokens, seconds in encoder.measured:
                batch_time.measured(tokens, seconds)
            self.queues[name] = EncodingQueue(core.share, limits, batch_time)
            self.spare_queues[name] = EncodingQueue(core.ledger.spare, short, batch_time)
        self._waiting: dict[EncodingRequest, Waiting] = {}
        self._wake: asyncio.TimerHandle | None = None
        if encoders:
            engine.work_beside(self)
            engine.failed.add_done_callback(self._engine_failed)

    async def encode(self, asked: EncodingAsk, queued: EncodingRequest) -> list[Vector]:
        """Return the vector of each input. Raises `Overloaded` if the queue is full, `DeadlineUnmeetable`,
        `DeadlineExceeded`, `InternalError`, `ModelFailed`, and `DeviceError` if the engine has failed.
        """
        queue = (self.spare_queues if queued.is_spare else self.queues)[asked.model]
        if self._engine.failed.done():
            raise self._engine.failed.result()
        expected = queue.wait_s(queued)
        if not queue.fits(queued):
            message = "The server is busy: the queue of inputs to encode is full. Try again shortly."
            raise Overloaded(message, retry_after=expected)
        if expected > asked.within:
            message = f"The deadline cannot be met: the last input is expected to be encoded in {expected:.3f} s."
            raise DeadlineUnmeetable(message, math.ceil(1000 * expected), expected - asked.within, asked.is_relative)
        waiting = self._waiting[queued] = Waiting(asked.inputs)
        queued.arrival = self._engine.clock()
        queue.add(queued)
        self._engine.side_work_soon()
        try:
            async with asyncio.timeout(None if asked.within == math.inf else asked.within):
                await waiting.done
        except TimeoutError:
            raise DeadlineExceeded("The deadline of the request passed before it could be met.") from None
        finally:
            queue.cancel(queued)
            del self._waiting[queued]
        return [vector for vector in waiting.vectors if vector is not None]

    def _engine_failed(self, failed: asyncio.Future[DeviceError]) -> None:
        for waiting in self._waiting.values():
            if not waiting.done.done():
                waiting.done.set_exception(failed.result())

    def next_job(self) -> SideJob[list[Vector | None]] | None:
        """Return the batch to encode now; None while none is due, or a tenant that is owed more runs."""
        now = self._engine.clock()
        if self._wake is not None:
            self._wake.cancel()
            self._wake = None
        # no paused answer is waited for
        running = [one for step in self._core.in_flight for one in step.sequences]
        others = {one.tenant for one in running if not one.is_spare}
        at, due = _due(self.queues, now)
        if due:
            return self._job(due, others, now)
        if at < math.inf:
            self._wake = asyncio.get_running_loop().call_later(at - now, self._engine.side_work_soon)
            return None
        head = self._core.scheduler.waiting.head()
        if others or not (head is None or head.is_spare):
            return None
        _, due = _due(self.spare_queues, now)
        return self._job(due, {one.tenant for one in running}, now) if due else None

    def _job(
        self, due: Mapping[str, EncodingQueue], running: Set[str], now: float
    ) -> SideJob[list[Vector | None]] | None:
        """Return a batch of the tenant that is owed most; None if none may go beside these `running` tenants."""
        share = next(iter(due.values())).share
        most = min(map(share.payback_of, running), default=math.inf)
        _, name = min([(queue.least_payback(most, now), name) for name, queue in due.items()])
        queue = due[name]
        if not (batch := queue.take_batch(now, most)):
            return None  # asked again after the next step
        inputs = [self._waiting[taken.request].inputs[taken.ordinal] for taken in batch]
        encoder = self._encoders[name]
        return SideJob(lambda: encoder.vectors(inputs), self._delivery(queue, batch), encoder.stream)

    def _delivery(
        self, queue: EncodingQueue, batch: Sequence[BatchInput]
    ) -> Callable[[list[Vector | None] | Exception, float], None]:
        def done(result: list[Vector | None] | Exception, elapsed: float) -> None:
            now = self._engine.clock()
            for tenant, seconds in queue.measured(batch, elapsed, now).items():
                self._core.charge_side_work(tenant, seconds, now, batch[0].request.is_spare)
            for number, taken in enumerate(batch):
                waiting = self._waiting.get(taken.request)
                if waiting is None or waiting.done.done():
                    continue
                if isinstance(result, Exception):
                    waiting.done.set_exception(_failure(result))
                elif (vector := result[number]) is None:
                    log.error("the model computed no numbers for an input: its weights or its dtype are at fault")
                    waiting.done.set_exception(ModelFailed())
                else:
                    waiting.vectors[taken.ordinal] = vector
                    waiting.num_missing -= 1
                    if not waiting.num_missing:
                        waiting.done.set_result(None)

        return done


def _due(queues: Mapping[str, EncodingQueue], now: float) -> tuple[float, dict[str, EncodingQueue]]:
    """Return when a batch of any queue is taken next, and the queues of which one is now."""
    times = {name: queue.taken_at(now) for name, queue in queues.items()}
    return min(times.values()), {name: queues[name] for name, at in times.items() if at <= now}


def _failure(error: Exception) -> Exception:
    failure = InternalError("The model failed to encode this request.")
    failure.__cause__ = error
    return failure
