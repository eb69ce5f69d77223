"""Calls, from an HTTP worker, the engine of another process."""

import asyncio
import pickle
from array import array
from collections.abc import Callable, Mapping
from math import inf
from typing import Any, cast

from backend.errors import DeviceError
from backend.scheduler.sequence import FinishReason, Sequence
from backend.stream import Delivery, TokenStream
from gateway.api.engine_client import EncodingAsk, KVMemory, ParsedAnswer
from gateway.api.engine_request import EngineRequest
from gateway.api.frontend import AdapterCard
from gateway.errors import ApiError
from gateway.replica.state import LoadTotals
from gateway.telemetry.request_record import RequestRecord
from gateway.tenants.auth import KeyRing
from gateway.tenants.effective_policy import EffectivePolicy
from gateway.workers.link import FrameKind, WorkerLink
from gateway.workers.logprobs import Entry, take_logprobs
from gateway.workers.messages import (
    Message,
    Update,
    end_message,
    error_message,
    error_of,
    parts,
    record_message,
    request_message,
)
from gateway.workers.token_ids import pack
from quotas.policy.policy import Policy
from quotas.reservation import LimitState
from quotas.stored import Held, Stored

GONE = "the engine's process has ended"
_NO_ENDS: frozenset[int] = frozenset()  # the engine adds end tokens and seed itself


class MirroredPolicy:
    """The policy in force, mirrored from the engine's process."""

    def __init__(self, policy: Policy) -> None:
        self.current = policy


class WorkerGeneration:
    """One request at the remote engine; see `Generation`.

    When the engine has ended all its streams it settles by itself, unless a stop string may end one here, or its
    reasoning is counted here.
    """

    def __init__(
        self,
        client: "WorkerClient",
        number: int,
        sequences: list[Sequence],
        is_settled_here: bool,
        fail: Callable[[ApiError], object],
    ) -> None:
        self.headers: Mapping[str, str] = {}
        self.streams = [TokenStream(sequence) for sequence in sequences]
        self.parsed: list[ParsedAnswer] = []
        self.admitted: asyncio.Future[Mapping[str, str]] = asyncio.get_running_loop().create_future()
        self.fail = fail
        self._client = client
        self._number = number
        self._is_settled_here = is_settled_here

    def stop(self, stream: TokenStream, num_tokens: int) -> None:
        stream.finish_reason = FinishReason.STOP
        self._client.stop(self._number, self.streams.index(stream), num_tokens)

    async def settle(self) -> None:
        if self._is_settled_here:
            await self._client.ask("settle", self._number, self._num_reasoning_tokens)

    def close(self) -> None:
        is_closed = not self._is_settled_here and all(stream.finish_reason is not None for stream in self.streams)
        self._client.close(self._number, len(self.streams), None if is_closed else self._num_reasoning_tokens)

    @property
    def _num_reasoning_tokens(self) -> int:
        return sum(one.num_reasoning_tokens for one in self.parsed)


class WorkerCharge:
    """A request charged in the engine's process; see `RequestCharge`."""

    def __init__(self, link: WorkerLink, number: int, headers: Mapping[str, str]) -> None:
        self.headers = headers
        self.was_served = False
        self._link = link
        self._number = number

    def close(self) -> None:
        self._link.send(FrameKind.CLOSE_CHARGE, [self._number, self.was_served])


class WorkerClient:
    """Calls the engine at the other end of a link; see `EngineClient`.

    Keys, policy and adapters here mirror the engine's. Requests, questions and charges are numbered; the streams of a
    request have its number and the numbers that follow.
    """

    def __init__(
        self,
        keys: KeyRing,
        policies: MirroredPolicy,
        refused_tenants: set[str],
        refused_keys: set[tuple[str, str | None]],
        clock: Callable[[], float],
        drain: Callable[[], object],
        end: Callable[[], object],
    ) -> None:
        """`drain` and `end` are called when the engine's process says so; `end`, too, when the link is lost."""
        self.refused_tenants = refused_tenants
        self.adapters: dict[str, AdapterCard] = {}
        self.link = WorkerLink(self._received, self._lost)
        # keys that exhausted a limit, to be checked with the engine; each with a mark of its last refusal
        self._refused_keys: dict[tuple[str, str | None], object] = {key: object() for key in refused_keys}
        self._keys = keys
        self._policies = policies
        self._clock = clock
        self._end = end
        self._next_number = 0
        self._numbers: dict[RequestRecord, int] = {}
        self._generations: dict[int, WorkerGeneration] = {}
        self._streams: dict[int, TokenStream] = {}
        self._delivery = Delivery(asyncio.get_running_loop().call_soon)
        self._questions: dict[int, asyncio.Future[tuple[Any, bytes]]] = {}
        self._is_lost = False
        self._receivers: dict[FrameKind, Callable[[Any, memoryview], object]] = {
            FrameKind.UPDATE: self._update,
            FrameKind.ADMITTED: self._admitted,
            FrameKind.REFUSED: self._refused,
            FrameKind.TOKENS: self._take_tokens,
            FrameKind.LOGPROBS: self._take_logprobs,
            FrameKind.STREAM_FAILED: self._stream_failed,
            FrameKind.FAIL: self._fail,
            FrameKind.ANSWER: self._answered,
            FrameKind.SUSPECT: self._suspect,
            FrameKind.DRAIN: lambda *_: drain(),
            FrameKind.END: lambda *_: end(),
        }

    # calls of endpoints

    async def generate(
        self,
        request: EngineRequest,
        policy: EffectivePolicy,
        record: RequestRecord,
        fail: Callable[[ApiError], object],
    ) -> WorkerGeneration:
        token_ids = await pack(request.prompts[:: request.num_answers])
        self._check_link()
        sequences = request.sequences(_NO_ENDS, int)
        number = self._take_numbers(len(sequences))
        is_settled_here = request.may_stop or request.may_reason
        generation = self._generations[number] = WorkerGeneration(self, number, sequences, is_settled_here, fail)
        for index, stream in enumerate(generation.streams):
            stream.sequence.arrival = self._clock()
            self._streams[number + index] = stream
        self._numbers[record] = number
        self.link.send(FrameKind.GENERATE, [number, record_message(record), request_message(request)], token_ids)
        try:
            generation.headers = await generation.admitted
        except ApiError:
            self._forget(number, len(sequences))
            raise
        except BaseException:
            generation.close()
            raise
        return generation

    async def refuse_unread(self, policy: EffectivePolicy, request_id: str) -> None:
        suspect = (policy.name, policy.key)
        if (suspicion := self._refused_keys.get(suspect)) is not None:
            await self.ask("refuse_unread", *suspect, request_id)
            if self._refused_keys.get(suspect) is suspicion:  # else it was refused meanwhile
                del self._refused_keys[suspect]

    async def refuse_spent(self, policy: EffectivePolicy) -> None:
        await self.ask("refuse_spent", policy.name, policy.key)

    async def check_refusals(self, policy: EffectivePolicy) -> None:
        await self.ask("check_refusals", policy.name, policy.key)

    async def refused(self, error: ApiError, tenant: str | None, key: str | None, peer: str, num_bytes: int) -> float:
        if self._is_lost or error.status >= 500:  # as the limiter does
            return 0.0
        return float(await self.ask("refused", error_message(error), tenant, key, peer, num_bytes))

    async def charge(self, policy: EffectivePolicy, in_passing: bool = False) -> WorkerCharge:
        number = self._take_numbers(1)
        try:
            return WorkerCharge(
                self.link, number, await self.ask("charge", policy.name, policy.key, in_passing, number)
            )
        except asyncio.CancelledError:  # it may have been charged
            WorkerCharge(self.link, number, {}).close()
            raise

    async def store_response(
        self,
        policy: EffectivePolicy,
        name: str,
        previous: str | None,
        contents: bytes,
        replaced: str | None = None,
        life: float = inf,
    ) -> Stored:
        told = (policy.name, policy.key, name, previous, replaced, None if life == inf else life)
        return cast(Stored, (await self._ask("store_response", told, contents))[0])

    async def read_responses(self, tenant: str, name: str, alone: bool) -> list[bytes] | None:
        sizes, contents = await self._ask("read_responses", (tenant, name, alone))
        return None if sizes is None else parts(contents, sizes)

    async def delete_response(self, tenant: str, name: str) -> bool:
        return bool(await self.ask("delete_response", tenant, name))

    async def open_response(self, tenant: str, what: str, name: str, most: int = 0) -> Held:
        return cast(Held, await self.ask("open_response", tenant, what, name, most))

    async def batches(self, what: str, *told: Any) -> Any:
        return await self.ask("batches", what, *told)

    async def encode(self, asked: EncodingAsk, policy: EffectivePolicy) -> tuple[Mapping[str, str], list[bytes]]:
        within = None if asked.within == inf else asked.within
        told = (
            policy.name,
            policy.key,
            asked.model,
            [*map(len, asked.inputs)],
            within,
            asked.is_relative,
            asked.usage_row,
        )
        token_ids = await pack(asked.inputs)
        (headers, sizes), vectors = await self._ask("encode", told, token_ids)
        return headers, parts(vectors, sizes)

    async def limit_states(self, policy: EffectivePolicy, session: str | None) -> list[LimitState]:
        limits = {limit.name: limit for limit in policy.charged_in(session)}
        states = await self.ask("limit_states", policy.name, policy.key, session)
        return [LimitState(limits[name], *known) for name, *known in states if name in limits]

    async def kv_memory(self, policy: EffectivePolicy) -> KVMemory:
        return KVMemory(*await self.ask("kv_memory", policy.name, policy.key))

    async def load(self) -> LoadTotals:
        return LoadTotals(**await self.ask("load"))

    async def health(self, probe: str) -> tuple[bool, Mapping[str, object]]:
        holds, details = await self.ask("health", probe)
        return holds, details

    async def metrics_text(self) -> bytes:
        text: str = await self.ask("metrics_text")
        return text.encode()

    async def ask(self, what: str, *told: Any) -> Any:
        answer, _ = await self._ask(what, told)
        return answer

    async def _ask(self, what: str, told: tuple[Any, ...], binary: bytes = b"") -> tuple[Any, bytes]:
        """The engine's answer, with its binary part. Raises the `ApiError` that it answers with."""
        self._check_link()
        number = self._take_numbers(1)
        answer: asyncio.Future[tuple[Any, bytes]] = asyncio.get_running_loop().create_future()
        self._questions[number] = answer
        self.link.send(FrameKind.ASK, [number, what, *told], binary)
        try:
            return await answer
        except asyncio.CancelledError:
            self.link.send(FrameKind.CANCEL, number)
            raise
        finally:
            del self._questions[number]

    def ended(self, record: RequestRecord) -> None:
        """Tell the engine's process of the end of any request."""
        number = self._numbers.pop(record, None)
        begun = record_message(record) if number is None else None
        self.link.send(FrameKind.ENDED, [number, begun, end_message(record)])

    def writing(self) -> list[Message]:
        """Requests with a pending write, each with the moment of its last progress."""
        return [
            [number, record.scope.writing_since]
            for record, number in self._numbers.items()
            if record.scope is not None and record.scope.writing_since is not None
        ]

    def stop(self, number: int, index: int, num_tokens: int) -> None:
        """End one stream of a request after `num_tokens` of its tokens; later ones are dropped."""
        self._streams.pop(number + index, None)
        self.link.send(FrameKind.STOP, [number, index, num_tokens])

    def close(self, number: int, num_streams: int, num_reasoning_tokens: int | None) -> None:
        """Forget a request; the engine ends it, with these tokens of reasoning. None: it has closed it itself."""
        self._forget(number, num_streams)
        if num_reasoning_tokens is not None:
            self.link.send(FrameKind.CLOSE, [number, num_reasoning_tokens])

    def _forget(self, number: int, num_streams: int) -> None:
        self._generations.pop(number, None)
        for stream in range(number, number + num_streams):
            self._streams.pop(stream, None)

    def _take_numbers(self, count: int) -> int:
        """Take `count` numbers in a row for a request's streams, a question or a charge; returns the first."""
        self._next_number += count
        return self._next_number - count

    def _check_link(self) -> None:
        if self._is_lost:
            raise DeviceError(GONE)

    # messages of the engine's process

    def _received(self, kind: FrameKind, message: Any, binary: memoryview) -> None:
        self._receivers[kind](message, binary)

    def _lost(self) -> None:
        """Fail all pending calls, and end the server."""
        self._is_lost = True
        for generation in self._generations.values():
            if not generation.admitted.done():
                generation.admitted.set_exception(DeviceError(GONE))
        for stream in self._streams.values():
            stream.fail(DeviceError(GONE))
        for answer in self._questions.values():
            if not answer.done():
                answer.set_exception(DeviceError(GONE))
        self._end()

    def _update(self, number: int, binary: memoryview) -> None:
        update: Update = pickle.loads(binary)  # noqa: S301 - from the parent process
        if update.policy is not None:
            self._policies.current = update.policy.of(self._policies.current)
        if update.adapters is not None:
            self.adapters.clear()
            self.adapters.update(update.adapters)
        self._keys.change(update.keys, update.revoked)
        self.link.send(FrameKind.UPDATED, number)

    def _admitted(self, message: Message, _: memoryview) -> None:
        number, headers = message
        if (generation := self._generations.get(number)) is not None and not generation.admitted.done():
            generation.admitted.set_result(headers)

    def _refused(self, message: Message, _: memoryview) -> None:
        number, error, device = message
        if (generation := self._generations.get(number)) is not None and not generation.admitted.done():
            generation.admitted.set_exception(DeviceError(device) if error is None else error_of(error))

    def _take_tokens(self, told: tuple[list[Message], list[Message]] | None, binary: memoryview) -> None:
        """Take tokens of any number of streams: the streams' numbers first, in 64 bits each, then the tokens.

        Beside them come the streams that end, and new ones with cached tokens of their prompt.
        """
        ends, cached = told or ((), ())
        middle = len(binary) // 12 * 8
        numbers, token_ids = array("Q", bytes(binary[:middle])), array("I", bytes(binary[middle:]))
        streams = self._streams
        for number, num_tokens in cached:
            if (stream := streams.get(number)) is not None:
                stream.sequence.num_cached_tokens = num_tokens
        for number, token_id in zip(numbers, token_ids, strict=True):
            if (stream := streams.get(number)) is not None:
                stream.sequence.output.append(token_id)
                if len(stream.sequence.output) >= stream.due and stream.put(None):
                    self._delivery.add(stream)
        for number, reason in ends:
            if (stream := streams.pop(number, None)) is not None:
                stream.end(FinishReason(reason))
        self._delivery.flush()

    def _take_logprobs(self, entries: list[Entry], binary: memoryview) -> None:
        """Take log probabilities of later tokens, or of the prompts before them."""
        streams = {number: self._streams[number].sequence for number, *_ in entries if number in self._streams}
        take_logprobs(entries, binary, streams)

    def _stream_failed(self, message: Message, _: memoryview) -> None:
        number, error = message
        if (stream := self._streams.pop(number, None)) is not None:
            stream.fail(DeviceError(error))

    def _fail(self, message: Message, _: memoryview) -> None:
        number, error = message
        if (generation := self._generations.get(number)) is not None:
            generation.fail(error_of(error))

    def _answered(self, message: Message, binary: memoryview) -> None:
        number, result, error = message
        answer = self._questions.get(number)
        if answer is None or answer.done():
            return
        if error is None:
            answer.set_result((result, bytes(binary)))
        else:
            answer.set_exception(error_of(error))

    def _suspect(self, message: Message, _: memoryview) -> None:
        tenant, key = message
        if key is None:
            self.refused_tenants.add(tenant)
        else:
            self._refused_keys[tenant, key] = object()
