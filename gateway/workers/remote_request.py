"""The engine's side of a request that an HTTP worker serves: its streams, and its scope."""

import asyncio
from array import array
from collections.abc import Callable
from typing import NamedTuple

from backend.errors import DeviceError
from backend.scheduler.batch import TokenLogprobs
from backend.scheduler.sequence import FinishReason, Sequence
from backend.stream import TokenStream
from gateway.api.engine_request import EngineRequest
from gateway.api.in_process_client import InProcessGeneration
from gateway.errors import ApiError
from gateway.workers.link import FrameKind, WorkerLink
from gateway.workers.logprobs import LogprobsMessage
from gateway.workers.messages import error_message


class RemoteStream(TokenStream):
    """The stream of a sequence whose consumer is in a worker: it stores no tokens and wakes no task here.

    A consumer that is not `eager` is sent the first token, by which it times the engine, and the rest with the last.
    """

    __slots__ = ("_num_put", "_outbox", "number", "request")

    def __init__(self, sequence: Sequence, number: int, request: "RemoteRequest", outbox: "Outbox") -> None:
        super().__init__(sequence)
        self.number = number
        self.request = request
        self._outbox = outbox
        self._num_put = 0  # tokens sent
        self.eager = request.asked.streams or request.asked.may_stop

    def put(self, reason: FinishReason | None) -> bool:
        if self._at_mark is not None:
            self._look_at_mark()
        output, num_put, outbox = self.sequence.output, self._num_put, self._outbox
        if not num_put:
            self._begin()
        if self._eager or not num_put:
            self._num_put = count = len(output)
            if count == num_put + 1:
                outbox.numbers.append(self.number)
                outbox.token_ids.append(output[num_put])
            else:  # a grammar may force several tokens at once
                outbox.numbers += [self.number] * (count - num_put)
                outbox.token_ids += output[num_put:]
            if not outbox.is_scheduled:
                outbox.schedule()
        if reason is not None:
            self.end(reason)
        return False

    def _begin(self) -> None:
        """Send the prompt's cached tokens, before the first token."""
        self._find_due()
        if self.sequence.num_cached_tokens:
            self._outbox.cached.append([self.number, self.sequence.num_cached_tokens])

    def end(self, reason: FinishReason) -> None:
        if self.finish_reason is None:
            self.finish_reason = reason
            if not self._eager:
                rest = self.sequence.output[self._num_put :]
                self._outbox.numbers += [self.number] * len(rest)
                self._outbox.token_ids += rest
            self._outbox.end(self)

    def fail(self, error: DeviceError) -> None:
        self._outbox.fail(self, error)


class DetailedRemoteStream(RemoteStream):
    """As `RemoteStream`, with log probabilities, which are sent with their tokens or earlier."""

    __slots__ = ("_num_told",)

    def __init__(self, sequence: Sequence, number: int, request: "RemoteRequest", outbox: "Outbox") -> None:
        super().__init__(sequence, number, request, outbox)
        self._num_told = 0

    def put(self, reason: FinishReason | None) -> bool:
        if self._eager or self._num_told == 0:
            self._tell()
        return super().put(reason)

    def end(self, reason: FinishReason) -> None:
        if self.finish_reason is None:
            self._tell()
        super().end(reason)

    def _tell(self) -> None:
        """Send the log probabilities of tokens since the last call, and first the prompt's."""
        sequence, first = self.sequence, self._num_told
        self._num_told = len(sequence.output)
        if first == 0 and sequence.prompt_logprobs and self.request.tells_of(sequence.prompt_logprobs):
            self._outbox.logprobs.add(self.number, sequence.prompt_logprobs, is_prompt=True)
        if sequence.logprobs is not None:
            self._outbox.logprobs.add(self.number, sequence.logprobs[first : self._num_told])


class Outbox:
    """Gathers the tokens of a step for all streams of one worker, which share a frame.

    Streams append to `numbers`, their own, and to `token_ids` themselves, and see that it is scheduled.
    """

    def __init__(self, link: WorkerLink, stream_ended: Callable[[RemoteStream], object]) -> None:
        self._link = link
        self._stream_ended = stream_ended
        self._call_soon = asyncio.get_running_loop().call_soon
        self.numbers: list[int] = []
        self.token_ids: list[int] = []
        self.cached: list[list[int]] = []  # new streams, each with its prompt's cached tokens
        self.logprobs = LogprobsMessage()
        self.is_scheduled = False
        self._ended: list[RemoteStream] = []

    def end(self, stream: RemoteStream) -> None:
        """Note the end of a stream in the next frame."""
        self._ended.append(stream)
        if not self.is_scheduled:
            self.schedule()

    def fail(self, stream: RemoteStream, error: DeviceError) -> None:
        """Tell that the engine failed a stream."""
        self._link.send(FrameKind.STREAM_FAILED, [stream.number, str(error)])

    def schedule(self) -> None:
        """Send after the running callback: the core may not be reentered while it delivers tokens."""
        self.is_scheduled = True
        self._call_soon(self._send)

    def _send(self) -> None:
        numbers, token_ids, cached, ended = self.numbers, self.token_ids, self.cached, self._ended
        self.numbers, self.token_ids, self.cached, self._ended, self.is_scheduled = [], [], [], [], False
        for stream in ended:
            self._stream_ended(stream)
        ends = [[stream.number, stream.finish_reason] for stream in ended]
        if self.logprobs.entries:
            logprobs, self.logprobs = self.logprobs, LogprobsMessage()
            self._link.send(FrameKind.LOGPROBS, logprobs.entries, logprobs.binary())
        told = [ends, cached] if ends or cached else None
        self._link.send(FrameKind.TOKENS, told, array("Q", numbers).tobytes() + array("I", token_ids).tobytes())


class Parsed(NamedTuple):
    """The answers of a request, as their reader in a worker has counted them."""

    num_reasoning_tokens: int


class RemoteRequest:
    """A worker's request, from its call of the engine to its end.

    It is the scope of its record, see `Cancellable`, and does not refer to the record: a cycle would wait for the
    garbage collector. It is settled once the engine has ended all its streams, before the client has the last token;
    or, if a stop string may end one earlier or the worker counts its reasoning, when the worker says so.
    """

    def __init__(self, number: int, asked: EngineRequest, link: WorkerLink) -> None:
        self.asked = asked
        self.error: ApiError | None = None
        self.ended_early: float | None = None
        self.writing_since: float | None = None
        self.task: asyncio.Task[None] | None = None  # while its limits are being charged
        self._number = number
        self._link = link
        self._generation: InProcessGeneration | None = None
        self._has_ended = False
        self._num_open = len(asked.prompts)  # unfinished streams
        self._told_prompts = set[int]()  # ids of lists, which live as long as the streams

    def admitted(self, generation: InProcessGeneration) -> None:
        """Take over the generation, and notify the worker."""
        self._generation = generation
        self._link.send(FrameKind.ADMITTED, [self._number, generation.headers])

    def refused(self, error: ApiError | None, device_error: str | None = None) -> None:
        """Tell the worker that the request was refused, or that the engine has failed."""
        self._link.send(FrameKind.REFUSED, [self._number, error and error_message(error), device_error])

    def fail(self, error: ApiError) -> None:
        if self.error is None and not self._has_ended:
            self.error = error
            self._link.send(FrameKind.FAIL, [self._number, error_message(error)])

    def tells_of(self, prompt_logprobs: list[TokenLogprobs]) -> bool:
        """True on the first call for a prompt's log probabilities, which its answers share."""
        is_new = id(prompt_logprobs) not in self._told_prompts
        self._told_prompts.add(id(prompt_logprobs))
        return is_new

    def stop(self, index: int, num_tokens: int) -> None:
        """End a stream whose text has reached a stop string after `num_tokens` of its tokens."""
        if self._generation is not None:
            self._generation.stop(self._generation.streams[index], num_tokens)

    def stream_ended(self) -> None:
        """Note that the engine has ended a stream."""
        self._num_open -= 1
        if self._num_open == 0 and not self.asked.may_stop and not self.asked.may_reason:
            self.settle_grant()

    def settle_grant(self, num_reasoning_tokens: int = 0) -> None:
        """Settle and close: all streams have ended, or were stopped."""
        if self._generation is not None:
            self._generation.parsed.append(Parsed(num_reasoning_tokens))
            self._generation.settle_now()
        self.close()

    def close(self, num_reasoning_tokens: int = 0) -> None:
        """End open streams, and settle if that has not happened; idempotent."""
        if self.task is not None:
            self.task.cancel()
        generation, self._generation = self._generation, None
        if generation is not None:
            generation.parsed.append(Parsed(num_reasoning_tokens))
            generation.close()

    def end(self) -> None:
        """Close, and ignore later failures."""
        self._has_ended = True
        self.close()
