"""A stream carries one sequence's tokens from the engine to their consumer."""

import asyncio
from collections.abc import Callable
from itertools import islice
from sys import maxsize

from backend.errors import DeviceError
from backend.scheduler.sequence import FinishReason, Sequence

STREAMS_PER_CALLBACK = 32


class TokenStream:
    """The stream of one sequence's output, of which one consumer takes all that is pending at once.

    The producer calls `put` for the last token, and for each token with which `due` or more are pending. A consumer
    that falls behind costs nothing. A consumer without use for tokens before the last clears `eager`: it is woken for
    the first and for the last alone.
    """

    __slots__ = (
        "_at_mark", "_eager", "_error", "_has_begun", "_mark", "_receiver", "_waiter",
        "due", "finish_reason", "num_taken", "sequence",
    )  # fmt: skip

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.due = 0  # tokens of output, from which on `put` is to be called
        self.finish_reason: FinishReason | None = None
        self.num_taken = 0  # tokens of the output that the consumer has taken
        self._eager = True
        self._has_begun = False  # `put` was called
        self._waiter: asyncio.Future[None] | None = None
        self._receiver: Callable[[], bool] | None = None
        self._error: DeviceError | None = None
        self._mark = 0  # tokens, of `_at_mark`
        self._at_mark: Callable[[], object] | None = None

    @property
    def eager(self) -> bool:
        return self._eager

    @eager.setter
    def eager(self, eager: bool) -> None:
        self._eager = eager
        self._find_due()

    def call_at(self, count: int, callback: Callable[[], object]) -> None:
        """Call back once, when `count` tokens or more have been generated."""
        self._mark, self._at_mark = count, callback
        self._look_at_mark()

    async def take(self, receiver: Callable[[], bool] | None = None) -> list[int]:
        """Return all tokens since the last call, at least one unless the stream has ended.

        While this waits, `receiver` is called for tokens that are not the last: a plain call costs less than waking a
        task. It takes the `rest` and returns True, or it takes nothing and returns False, and this call returns them.

        The stream has ended when `finish_reason` is set. Raises `DeviceError` when the engine failed, and the
        receiver's errors.
        """
        while len(self.sequence.output) == self.num_taken and self.finish_reason is None:
            if self._error is not None:
                raise self._error
            self._waiter, self._receiver = asyncio.get_running_loop().create_future(), receiver
            try:
                await self._waiter
            finally:
                self._waiter = self._receiver = None
        return self.rest()

    def rest(self) -> list[int]:
        """Return the tokens since the last call, without waiting."""
        tokens = self.sequence.output[self.num_taken :]
        self.num_taken += len(tokens)
        return tokens

    def put(self, reason: FinishReason | None) -> bool:
        """Record that the output has a new token, with which it ends if there is a reason. Returns True if the consumer
        is to be woken for it.
        """
        self.finish_reason = reason
        if self._at_mark is not None:
            self._look_at_mark()
        is_first, self._has_begun = not self._has_begun, True
        if self._eager:
            return True
        self._find_due()
        return reason is not None or is_first

    def _find_due(self) -> None:
        """Find the next token that the consumer or the mark waits for."""
        first = 0 if self._eager else maxsize if self.sequence.output else 1
        self.due = first if self._at_mark is None else min(first, self._mark)

    def _look_at_mark(self) -> None:
        if self._at_mark is not None and len(self.sequence.output) >= self._mark:
            callback, self._at_mark = self._at_mark, None
            callback()
        self._find_due()

    def end(self, reason: FinishReason) -> None:
        """End the stream: it gets no more tokens."""
        self.finish_reason = reason
        self.wake()

    def fail(self, error: DeviceError) -> None:
        self._error = error
        self.wake()

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def deliver(self) -> None:
        """Deliver the pending tokens, unless the consumer is busy, and will look for itself, or is cancelled."""
        waiter = self._waiter
        if waiter is None or waiter.done() or len(self.sequence.output) == self.num_taken:
            return
        try:
            if self.finish_reason is not None or self._receiver is None or not self._receiver():
                waiter.set_result(None)
        except Exception as error:  # noqa: BLE001 - it is the consumer's own
            waiter.set_exception(error)


class Delivery:
    """Delivers to streams a few at a time, so that planning the next step never waits behind hundreds of writes.

    First tokens are delivered before others: the writes of hundreds of decodes are milliseconds of a newcomer's wait.
    The spare class comes last and one at a time: each makes an answer as a whole, and many may end in one step.
    """

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
        self._first: dict[TokenStream, None] = {}  # streams of which nothing was taken; each once, oldest first
        self._later: dict[TokenStream, None] = {}  # the other streams with tokens, likewise
        self._spare: dict[TokenStream, None] = {}  # of the spare class
        self._scheduled = False

    def add(self, stream: TokenStream) -> None:
        """Deliver the stream's tokens at the next flush."""
        kind = self._spare if stream.sequence.is_spare else self._later if stream.num_taken else self._first
        kind[stream] = None

    def flush(self) -> None:
        """Deliver soon to the streams added so far."""
        if (self._first or self._later or self._spare) and not self._scheduled:
            self._scheduled = True
            self._call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        others = self._first or self._later
        ready, count = (others, STREAMS_PER_CALLBACK) if others else (self._spare, 1)
        for stream in list(islice(ready, count)):
            del ready[stream]
            stream.deliver()
        self.flush()
