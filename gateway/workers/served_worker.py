"""Serves one HTTP worker's calls, in the engine's process."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from itertools import count
from math import inf
from typing import Any, NamedTuple

from admission.outcome import Outcome
from backend.errors import DeviceError
from backend.scheduler.sequence import Sequence
from gateway.api.engine_client import EncodingAsk
from gateway.api.in_process_client import InProcessCharge, InProcessClient
from gateway.api.refusals import refusal_of
from gateway.errors import ApiError
from gateway.telemetry.request_record import RequestRecord, current
from gateway.tenants.effective_policy import EffectivePolicy
from gateway.workers.link import FrameKind, WorkerLink
from gateway.workers.messages import Message, end, engine_request_of, error_message, error_of, record_of
from gateway.workers.remote_request import DetailedRemoteStream, Outbox, RemoteRequest, RemoteStream
from gateway.workers.stats import WorkerStats
from gateway.workers.token_ids import unpack

log = logging.getLogger(__name__)


class ServedWorker:
    """The engine's side of one worker: it lives as long as their link."""

    def __init__(
        self,
        client: InProcessClient,
        on_report: Callable[[WorkerStats, Message], object],
        on_lost: Callable[[], object],
    ) -> None:
        """`on_report` is called every second with the worker's figures and the latest latencies."""
        self.link = WorkerLink(self._received, self._lost)
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._client = client
        self._service = client.service
        self._on_report = on_report
        self._on_lost = on_lost
        self._is_lost = False
        self._outbox = Outbox(self.link, lambda stream: stream.request.stream_ended())
        self._requests: dict[int, tuple[RemoteRequest, RequestRecord]] = {}
        self._charges: dict[int, InProcessCharge] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}  # of requests that wait for their limits, and of questions
        self._updates: dict[int, asyncio.Future[None]] = {}
        self._numbers = count()
        self._receivers: dict[FrameKind, Callable[[Any, memoryview], object]] = {
            FrameKind.READY: self._is_ready,
            FrameKind.UPDATED: self._updated,
            FrameKind.GENERATE: self._generate,
            FrameKind.STOP: self._stop,
            FrameKind.CLOSE: self._close,
            FrameKind.ENDED: self._ended,
            FrameKind.ASK: self._asked,
            FrameKind.CANCEL: self._cancelled,
            FrameKind.CLOSE_CHARGE: self._close_charge,
            FrameKind.STATS: self._reported,
        }
        self._questions: dict[str, Callable[..., Awaitable[Any]]] = {
            "settle": self._settle,
            "refuse_unread": lambda tenant, key, name: client.refuse_unread(self._policy(tenant, key), name),
            "refuse_spent": lambda tenant, key: client.refuse_spent(self._policy(tenant, key)),
            "check_refusals": lambda tenant, key: client.check_refusals(self._policy(tenant, key)),
            "refused": lambda error, *told: client.refused(error_of(error), *told),
            "charge": self._charge,
            "encode": self._encode,
            "store_response": self._store_response,
            "read_responses": self._read_responses,
            "delete_response": client.delete_response,
            "open_response": client.open_response,
            "batches": client.batches,
            "limit_states": self._limit_states,
            "kv_memory": lambda tenant, key: client.kv_memory(self._policy(tenant, key)),
            "load": self._load,
            "health": client.health,
            "metrics_text": self._metrics_text,
        }

    async def update(self, pickled: bytes) -> None:
        """Send a pickled `Update`, and wait until it is applied or the worker is lost."""
        if self._is_lost:
            return
        number, done = next(self._numbers), asyncio.get_running_loop().create_future()
        self._updates[number] = done
        self.link.send(FrameKind.UPDATE, number, pickled)
        await done

    def suspect(self, tenant: str, key: str | None) -> None:
        """Make the worker call before it reads a body with this key, which exhausted a limit; without a key, with any
        key of the tenant, which sent a faulty request.
        """
        self.link.send(FrameKind.SUSPECT, [tenant, key])

    def _received(self, kind: FrameKind, message: Any, binary: memoryview) -> None:
        self._receivers[kind](message, binary)

    def _lost(self) -> None:
        """End all requests of the worker: its clients have lost their connections."""
        self._is_lost = True
        with ExitStack() as ending:  # each callback runs, even if another raises
            ending.callback(self._on_lost)
            for done in self._updates.values():
                ending.callback(done.set_result, None)
            for request, record in self._requests.values():
                ending.callback(self._service.telemetry.ended, record, Outcome.FAILED)
                ending.callback(request.end)
            for charge in self._charges.values():
                ending.callback(charge.close)
            for task in self._tasks.values():
                ending.callback(task.cancel)
            self._requests, self._charges, self._updates = {}, {}, {}

    def _is_ready(self, *_: object) -> None:
        self.ready.set_result(None)

    def _updated(self, number: int, _: memoryview) -> None:
        self._updates.pop(number).set_result(None)

    # requests to generate

    def _generate(self, message: Message, binary: memoryview) -> None:
        number, begun, requested = message
        asked, lengths = engine_request_of(requested)
        record = record_of(begun, asked.sampling)
        request = record.scope = RemoteRequest(number, asked, self.link)
        self._requests[number] = request, record
        self._service.telemetry.live.add(record)
        try:
            policy = self._policy(asked.tenant, asked.key)
            policy.require("inference")
        except Exception as error:  # noqa: BLE001 - each becomes an answer
            _refuse(request, error)
            return
        request.task = asyncio.create_task(self._admit(request, record, number, policy, (bytes(binary), lengths)))
        self._keep(number, request.task)

    async def _admit(
        self,
        request: RemoteRequest,
        record: RequestRecord,
        number: int,
        policy: EffectivePolicy,
        token_ids: tuple[bytes, list[int]],
    ) -> None:
        """Generate for a request, whose prompts' ids and lengths are given."""
        current.set(record)
        streams, sampling = count(number), request.asked.sampling
        is_plain = sampling.logprobs is None and sampling.prompt_logprobs is None
        kind = RemoteStream if is_plain else DetailedRemoteStream

        def make_stream(sequence: Sequence) -> RemoteStream:
            return kind(sequence, next(streams), request, self._outbox)

        try:
            asked, (packed, lengths) = request.asked, token_ids
            await unpack(packed, asked.prompts[:: asked.num_answers], lengths)
            generation = await self._client.generate(request.asked, policy, record, request.fail, make_stream)
            request.admitted(generation)
        except Exception as error:  # noqa: BLE001 - each becomes an answer
            _refuse(request, error)
        finally:
            request.task = None

    def _policy(self, tenant: str, key: str) -> EffectivePolicy:
        """The key's policy, by the keys and policy of this process."""
        return self._service.effective_policies.of(self._service.keys.find(tenant, key))

    def _stop(self, message: Message, _: memoryview) -> None:
        number, index, num_tokens = message
        if number in self._requests:
            self._requests[number][0].stop(index, num_tokens)

    def _close(self, message: Message, _: memoryview) -> None:
        number, num_reasoning_tokens = message
        if number in self._requests:
            self._requests[number][0].close(num_reasoning_tokens)

    def _ended(self, message: Message, _: memoryview) -> None:
        number, begun, ended = message
        if number is None:
            record = record_of(begun)
        else:
            request, record = self._requests.pop(number)
            request.end()
        outcome, at = end(record, ended)
        self._service.telemetry.ended(record, outcome, at)

    # questions

    def _asked(self, message: Message, binary: memoryview) -> None:
        number, what, *told = message
        if binary:
            told.append(bytes(binary))
        self._keep(number, asyncio.create_task(self._answer(number, self._questions[what], told)))

    def _cancelled(self, number: int, _: memoryview) -> None:
        if number in self._tasks:
            self._tasks[number].cancel()

    async def _answer(self, number: int, question: Callable[..., Any], told: Message) -> None:
        answer, binary, error = None, b"", None
        try:
            answer = await question(*told)
            if isinstance(answer, _Bulk):
                answer, binary = answer
        except Exception as failure:
            refusal = refusal_of(failure)
            if not isinstance(failure, ApiError):
                log.error("a call of a worker failed", exc_info=failure, extra={"discreet": True})
            error = error_message(refusal)
        self.link.send(FrameKind.ANSWER, [number, answer, error], binary)

    async def _settle(self, number: int, num_reasoning_tokens: int) -> None:
        if number in self._requests:
            self._requests[number][0].settle_grant(num_reasoning_tokens)

    async def _charge(self, tenant: str, key: str, in_passing: bool, number: int) -> Mapping[str, str]:
        charge = self._charges[number] = await self._client.charge(self._policy(tenant, key), in_passing)
        return charge.headers

    def _close_charge(self, message: Message, _: memoryview) -> None:
        number, was_served = message
        if (charge := self._charges.pop(number, None)) is not None:
            charge.was_served = was_served
            charge.close()

    async def _encode(
        self,
        tenant: str,
        key: str,
        model: str,
        lengths: list[int],
        within: float | None,
        is_relative: bool,
        usage_row: str | None,
        ids: bytes,
    ) -> "_Bulk":
        inputs = [list[int]() for _ in lengths]
        await unpack(ids, inputs, lengths)
        asked = EncodingAsk(model, inputs, inf if within is None else within, is_relative, usage_row)
        headers, vectors = await self._client.encode(asked, self._policy(tenant, key))
        return _Bulk([headers, [*map(len, vectors)]], b"".join(vectors))

    async def _store_response(
        self,
        tenant: str,
        key: str,
        name: str,
        previous: str | None,
        replaced: str | None,
        life: float | None,
        contents: bytes,
    ) -> str:
        life = inf if life is None else life
        return await self._client.store_response(self._policy(tenant, key), name, previous, contents, replaced, life)

    async def _read_responses(self, tenant: str, name: str, alone: bool) -> "_Bulk | None":
        contents = await self._client.read_responses(tenant, name, alone)
        return None if contents is None else _Bulk([*map(len, contents)], b"".join(contents))

    async def _limit_states(self, tenant: str, key: str, session: str | None) -> list[Message]:
        states = await self._client.limit_states(self._policy(tenant, key), session)
        return [[state.limit.name, *state[1:]] for state in states]

    async def _load(self) -> dict[str, float]:
        return asdict(await self._client.load())

    async def _metrics_text(self) -> str:
        return (await self._client.metrics_text()).decode()

    def _reported(self, message: Message, _: memoryview) -> None:
        writing, stats, latencies = message
        since = dict(writing)
        for number, (request, _record) in self._requests.items():
            request.writing_since = since.get(number)
        self._on_report(WorkerStats(*stats), latencies)

    def _keep(self, number: int, task: "asyncio.Task[None]") -> None:
        self._tasks[number] = task
        task.add_done_callback(lambda _: self._tasks.pop(number))


class _Bulk(NamedTuple):
    """An answer with a binary part."""

    message: Message
    binary: bytes


def _refuse(request: RemoteRequest, error: Exception) -> None:
    if isinstance(error, DeviceError):
        request.refused(None, str(error))
        return
    if not isinstance(error, ApiError):
        log.error("a request of a worker failed", exc_info=error, extra={"discreet": True})
    request.refused(refusal_of(error))
