"""Serves, in the engine's process, what one HTTP worker asks for."""

import asyncio
import logging
from array import array
from collections.abc import Awaitable, Callable, Mapping
from itertools import count
from typing import Any

from admission.outcome import Outcome
from backend.errors import DeviceError
from backend.scheduler.sequence import FinishReason, Sequence
from backend.stream import TokenStream
from gateway.api.engine_request import EngineRequest
from gateway.api.in_process_client import InProcessCharge, InProcessClient, InProcessGeneration
from gateway.api.refusals import refusal_of
from gateway.errors import ApiError, InvalidApiKey
from gateway.telemetry.request_record import RequestRecord, current
from gateway.tenants.effective_policy import EffectivePolicy
from gateway.workers.link import Kind, Link
from gateway.workers.messages import Message, end, error_message, error_of, record_of, request_of
from gateway.workers.stats import WorkerStats
from quotas.quotas import Grant

log = logging.getLogger(__name__)

_NONE: Mapping[str, str] = {}


class RemoteStream(TokenStream):
    """The stream of a sequence whose consumer is in a worker: it keeps nothing, and wakes nobody here.

    A consumer that is not `eager` is sent the first token, by which it times the engine, and the rest with the last.
    """

    __slots__ = ("_is_eager", "_outbox", "number", "request")

    def __init__(self, sequence: Sequence, number: int, request: "RemoteRequest", outbox: "Outbox") -> None:
        super().__init__(sequence)
        self.number = number
        self.request = request
        self._outbox = outbox
        self._is_eager = request.asked.streams or request.asked.may_stop

    def put(self, token_id: int, reason: FinishReason | None) -> bool:
        generated = len(self.sequence.output)
        if generated >= self._mark:
            self._look_at_mark(generated)
        if self._is_eager or generated == 1:
            self._outbox.add(self.number, token_id)
        if reason is not None:
            self.end(reason)
        return False

    def end(self, reason: FinishReason) -> None:
        if self.finish_reason is None:
            self.finish_reason = reason
            if not self._is_eager:
                for token_id in self.sequence.output[1:]:
                    self._outbox.add(self.number, token_id)
            self._outbox.end(self)

    def fail(self, error: DeviceError) -> None:
        self._outbox.fail(self, error)


class Outbox:
    """Gathers the tokens of a step for all streams of one worker, which share a frame."""

    def __init__(self, link: Link, stream_ended: Callable[[RemoteStream], object]) -> None:
        self._link = link
        self._stream_ended = stream_ended
        self._call_soon = asyncio.get_running_loop().call_soon
        self._numbers: list[int] = []
        self._token_ids: list[int] = []
        self._ended: list[RemoteStream] = []
        self._is_scheduled = False

    def add(self, number: int, token_id: int) -> None:
        """Add a token of a stream."""
        self._numbers.append(number)
        self._token_ids.append(token_id)
        if not self._is_scheduled:
            self._schedule()

    def end(self, stream: RemoteStream) -> None:
        """Add that a stream has ended."""
        self._ended.append(stream)
        if not self._is_scheduled:
            self._schedule()

    def fail(self, stream: RemoteStream, error: DeviceError) -> None:
        """Tell that the engine failed a stream."""
        self._link.send(Kind.STREAM_FAILED, [stream.number, str(error)])

    def _schedule(self) -> None:
        """Send after what runs now: the core may not be called by those to whom it is handing its tokens."""
        self._is_scheduled = True
        self._call_soon(self._send)

    def _send(self) -> None:
        numbers, token_ids, ended = self._numbers, self._token_ids, self._ended
        self._numbers, self._token_ids, self._ended, self._is_scheduled = [], [], [], False
        for stream in ended:
            self._stream_ended(stream)
        ends = [[stream.number, stream.finish_reason] for stream in ended] or None
        self._link.send(Kind.TOKENS, ends, array("Q", numbers).tobytes() + array("I", token_ids).tobytes())


class RemoteRequest:
    """A request of a worker, from when it asks the engine to its end; it is the scope of its record, see `Cancellable`.

    It is settled once the engine has ended all its streams, which is before its client has the last token; or, where
    a stop string may end one before that, when the worker says so.
    """

    def __init__(self, number: int, record: RequestRecord, asked: EngineRequest, link: Link) -> None:
        self.record = record
        self.asked = asked
        self.error: ApiError | None = None
        self.ended_early: float | None = None
        self.writing_since: float | None = None
        self.task: asyncio.Task[None] | None = None  # while its limits are asked
        self._number = number
        self._link = link
        self._generation: InProcessGeneration | None = None
        self._num_open = len(asked.prompts)  # streams that the engine has not ended

    def admitted(self, generation: InProcessGeneration) -> None:
        """Take the generation over, and tell the worker."""
        self._generation = generation
        self._link.send(Kind.ADMITTED, [self._number, generation.headers])

    def refused(self, error: ApiError | None, device_error: str | None = None) -> None:
        """Tell the worker that the request was refused, or that the engine has failed."""
        self._link.send(Kind.REFUSED, [self._number, error and error_message(error), device_error])

    def fail(self, error: ApiError) -> None:
        if self.error is None and self.record.outcome is None:
            self.error = error
            self._link.send(Kind.FAIL, [self._number, error_message(error)])

    def stop(self, index: int, num_tokens: int) -> None:
        """End a stream, whose text has reached a stop string after so many of its tokens."""
        if self._generation is not None:
            self._generation.stop(self._generation.streams[index], num_tokens)

    def stream_ended(self) -> None:
        """Note that the engine has ended a stream."""
        self._num_open -= 1
        if self._num_open == 0 and not self.asked.may_stop:
            self.settle()

    def settle(self) -> None:
        """Settle and close: all streams have ended, or were stopped."""
        if self._generation is not None:
            self._generation.settle_now()
        self.close()

    def close(self) -> None:
        """End what goes on, and settle if that was not done yet; a second call does nothing."""
        if self.task is not None:
            self.task.cancel()
        generation, self._generation = self._generation, None
        if generation is not None:
            generation.close()


class ServedWorker:
    """The engine's side of one worker: it lives as long as their link."""

    def __init__(
        self,
        client: InProcessClient,
        on_report: Callable[[WorkerStats, Message], object],
        on_lost: Callable[[], object],
    ) -> None:
        """`on_report` is called every second with the worker's figures and the latencies since the last time."""
        self.link = Link(self._received, self._lost)
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = client
        self._service = client.service
        self._on_report = on_report
        self._on_lost = on_lost
        self._is_lost = False
        self._outbox = Outbox(self.link, lambda stream: stream.request.stream_ended())
        self._requests: dict[int, RemoteRequest] = {}
        self._charges: dict[int, InProcessCharge] = {}
        self._tasks = set[asyncio.Task[None]]()
        self._updates: dict[int, asyncio.Future[None]] = {}
        self._numbers = count()
        self._receivers: dict[Kind, Callable[[Any, memoryview], object]] = {
            Kind.READY: self._is_ready,
            Kind.UPDATED: self._updated,
            Kind.GENERATE: self._generate,
            Kind.STOP: self._stop,
            Kind.CLOSE: self._close,
            Kind.ENDED: self._ended,
            Kind.ASK: self._asked,
            Kind.CLOSE_CHARGE: self._close_charge,
            Kind.STATS: self._reported,
        }
        self._questions: dict[str, Callable[..., Awaitable[Any]]] = {
            "settle": self._settle,
            "refuse_unread": lambda tenant, key, name: client.refuse_unread(self._policy(tenant, key), name),
            "refuse_spent": lambda tenant, key: client.refuse_spent(self._policy(tenant, key)),
            "check_refusals": lambda tenant, key: client.check_refusals(self._policy(tenant, key)),
            "refused": lambda error, *told: client.refused(error_of(error), *told),
            "charge": self._charge,
            "limit_states": self._limit_states,
            "health": client.health,
            "metrics_text": self._metrics_text,
        }

    async def update(self, pickled: bytes) -> None:
        """Send a pickled `Update`, and wait until it is in force or the worker is gone."""
        if self._is_lost:
            return
        number, done = next(self._numbers), asyncio.get_running_loop().create_future()
        self._updates[number] = done
        self.link.send(Kind.UPDATE, number, pickled)
        await done

    def suspect(self, tenant: str, key: str | None) -> None:
        """Have the worker ask before it reads a body with this key, of which a limit was spent; without a key, before
        any of the tenant's, of which one was refused for what it is.
        """
        self.link.send(Kind.SUSPECT, [tenant, key])

    def _received(self, kind: Kind, message: Any, binary: memoryview) -> None:
        self._receivers[kind](message, binary)

    def _lost(self) -> None:
        """End all that the worker had: its clients have lost their connections."""
        self._is_lost = True
        for task in self._tasks:
            task.cancel()
        for charge in self._charges.values():
            charge.close()
        for request in self._requests.values():
            request.close()
            self._service.telemetry.ended(request.record, Outcome.FAILED)
        for done in self._updates.values():
            done.set_result(None)
        self._requests, self._charges, self._updates = {}, {}, {}
        self._on_lost()

    def _is_ready(self, *_: object) -> None:
        self.ready.set_result(None)

    def _updated(self, number: int, _: memoryview) -> None:
        self._updates.pop(number).set_result(None)

    # requests to generate

    def _generate(self, message: Message, binary: memoryview) -> None:
        number, begun, requested = message
        asked = request_of(requested, binary)
        record = record_of(begun, asked.sampling)
        request = record.scope = self._requests[number] = RemoteRequest(number, record, asked, self.link)
        self._service.telemetry.live.add(record)
        try:
            policy = self._policy(asked.tenant, asked.key)
            policy.require("inference")
            sequences = self._client.prepare(asked, policy, record)
            if not policy.charged:
                self._admit(request, number, sequences)
                return
        except Exception as error:  # noqa: BLE001 - each becomes an answer
            _refuse(request, error)
            return
        request.task = asyncio.create_task(self._reserve(request, number, sequences, policy))
        self._keep(request.task)

    async def _reserve(
        self, request: RemoteRequest, number: int, sequences: list[Sequence], policy: EffectivePolicy
    ) -> None:
        current.set(request.record)
        try:
            grant = await self._client.reserve(request.asked, sequences, policy)
            request.task = None  # from here on nothing waits
            self._admit(request, number, sequences, grant, policy.rate_headers.of(grant.states))
        except Exception as error:  # noqa: BLE001 - each becomes an answer
            request.task = None
            _refuse(request, error)

    def _admit(
        self,
        request: RemoteRequest,
        number: int,
        sequences: list[Sequence],
        grant: Grant | None = None,
        headers: Mapping[str, str] = _NONE,
    ) -> None:
        streams = count(number)

        def make_stream(sequence: Sequence) -> RemoteStream:
            return RemoteStream(sequence, next(streams), request, self._outbox)

        token = current.set(request.record)
        try:
            generation = self._client.admit(
                request.asked, sequences, request.record, request.fail, grant, headers, make_stream
            )
        finally:
            current.reset(token)
        request.admitted(generation)

    def _policy(self, tenant: str, key: str) -> EffectivePolicy:
        """Returns what a key may do, by the keys and the policy as they are here and now."""
        principal = self._service.keys.find(key)
        if principal is None or principal.tenant != tenant:
            raise InvalidApiKey("Incorrect API key provided: it is unknown, revoked or expired.")
        return self._service.effective_policies.of(principal)

    def _stop(self, message: Message, _: memoryview) -> None:
        number, index, num_tokens = message
        if (request := self._requests.get(number)) is not None:
            request.stop(index, num_tokens)

    def _close(self, number: int, _: memoryview) -> None:
        if (request := self._requests.get(number)) is not None:
            request.close()

    def _ended(self, message: Message, _: memoryview) -> None:
        number, begun, ended = message
        request = None if number is None else self._requests.pop(number, None)
        if request is None:
            record = record_of(begun)
        else:
            record = request.record
            request.close()
        outcome, at = end(record, ended)
        self._service.telemetry.ended(record, outcome, at)

    # questions

    def _asked(self, message: Message, _: memoryview) -> None:
        number, what, *told = message
        self._keep(asyncio.create_task(self._answer(number, self._questions[what], told)))

    async def _answer(self, number: int, question: Callable[..., Any], told: Message) -> None:
        answer, error = None, None
        try:
            answer = await question(*told)
        except Exception as failure:
            refusal = refusal_of(failure)
            if not isinstance(failure, ApiError):
                log.error("a question of a worker failed", exc_info=failure, extra={"discreet": True})
            error = error_message(refusal)
        self.link.send(Kind.ANSWER, [number, answer, error])

    async def _settle(self, number: int) -> None:
        if (request := self._requests.get(number)) is not None:
            request.settle()

    async def _charge(self, tenant: str, key: str) -> Message:
        charge = await self._client.charge(self._policy(tenant, key))
        number = next(self._numbers)
        self._charges[number] = charge
        return [number, charge.headers]

    def _close_charge(self, message: Message, _: memoryview) -> None:
        number, was_served = message
        if (charge := self._charges.pop(number, None)) is not None:
            charge.was_served = was_served
            charge.close()

    async def _limit_states(self, tenant: str, key: str) -> list[Message]:
        states = await self._client.limit_states(self._policy(tenant, key))
        return [[state.limit.name, state.remaining, state.reset] for state in states]

    async def _metrics_text(self) -> str:
        return (await self._client.metrics_text()).decode()

    def _reported(self, message: Message, _: memoryview) -> None:
        writing, stats, latencies = message
        since = dict(writing)
        for number, request in self._requests.items():
            request.writing_since = since.get(number)
        self._on_report(WorkerStats(*stats), latencies)

    def _keep(self, task: "asyncio.Task[None]") -> None:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _refuse(request: RemoteRequest, error: Exception) -> None:
    if isinstance(error, DeviceError):
        request.refused(None, str(error))
        return
    if not isinstance(error, ApiError):
        log.error("a request of a worker failed", exc_info=error, extra={"discreet": True})
    request.refused(refusal_of(error))
