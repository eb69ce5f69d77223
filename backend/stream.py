"""A stream carries tokens from the engine to whoever asked for them."""

import asyncio
from collections.abc import Callable
from itertools import islice

from backend.errors import DeviceError
from backend.scheduler.sequence import FinishReason, Sequence

STREAMS_PER_CALLBACK = 32


class TokenStream:
    """The stream of one sequence's tokens. The engine appends, one consumer takes all that is pending at once.

    Bounded by the sequence's max_tokens, so a consumer that falls behind costs 8 bytes a token and nothing else. One
    that has no use for tokens before the last clears `eager`: it is woken for the first and for the last alone.
    """

    __slots__ = (
        "_at_mark", "_error", "_mark", "_pending", "_receiver", "_waiter",
        "eager", "finish_reason", "sequence",
    )  # fmt: skip

    def __init__(self, sequence: Sequence) -> None:
        self.sequence = sequence
        self.eager = True
        self.finish_reason: FinishReason | None = None
        self._pending: list[int] = []
        self._waiter: asyncio.Future[None] | None = None
        self._receiver: Callable[[], bool] | None = None
        self._error: DeviceError | None = None
        self._mark = 0  # tokens, of `_at_mark`
        self._at_mark: Callable[[], object] | None = None

    def call_at(self, count: int, callback: Callable[[], object]) -> None:
        """Call back once, when `count` tokens or more have been generated."""
        self._mark, self._at_mark = count, callback
        self._look_at_mark()

    async def take(self, receiver: Callable[[], bool] | None = None) -> list[int]:
        """Return all tokens since the last call, at least one unless the stream has ended.

        While this waits, `receiver` is called for tokens that are not the last: a plain call costs less than to wake a
        task. It takes the `rest` and returns True, or it takes nothing and returns False, and this returns them.

        The stream has ended when `finish_reason` is set. Raises `DeviceError` when the engine failed, and whatever the
        receiver raises.
        """
        while not self._pending and self.finish_reason is None:
            if self._error is not None:
                raise self._error
            self._waiter, self._receiver = asyncio.get_running_loop().create_future(), receiver
            try:
                await self._waiter
            finally:
                self._waiter = self._receiver = None
        return self.rest()

    def rest(self) -> list[int]:
        """Return what has come since the last call, without waiting."""
        tokens, self._pending = self._pending, []
        return tokens

    def put(self, token_id: int, reason: FinishReason | None) -> bool:
        """Append a token. Returns True if the consumer is to be woken for it."""
        self._pending.append(token_id)
        self.finish_reason = reason
        if self._at_mark is not None and len(self.sequence.output) >= self._mark:
            self._look_at_mark()
        return self.eager or reason is not None or len(self.sequence.output) == 1

    def _look_at_mark(self) -> None:
        if self._at_mark is not None and len(self.sequence.output) >= self._mark:
            callback, self._at_mark = self._at_mark, None
            callback()

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
        """Hand over what is pending, unless the consumer is busy, and will look for itself, or is cancelled."""
        waiter = self._waiter
        if waiter is None or waiter.done() or not self._pending:
            return
        try:
            if self.finish_reason is not None or self._receiver is None or not self._receiver():
                waiter.set_result(None)
        except Exception as error:  # noqa: BLE001 - it is the consumer's own
            waiter.set_exception(error)


class Delivery:
    """Delivers to streams a few at a time, so that planning the next step never waits behind hundreds of writes."""

    def __init__(self, call_soon: Callable[[Callable[[], None]], object]) -> None:
        self._call_soon = call_soon
        self._ready: dict[TokenStream, None] = {}  # each once, oldest first
        self._scheduled = False

    def add(self, stream: TokenStream) -> None:
        self._ready[stream] = None

    def flush(self) -> None:
        """Have the streams added so far delivered to, soon."""
        if self._ready and not self._scheduled:
            self._scheduled = True
            self._call_soon(self._drain)

    def _drain(self) -> None:
        self._scheduled = False
        for stream in list(islice(self._ready, STREAMS_PER_CALLBACK)):
            del self._ready[stream]
            stream.deliver()
        self.flush()
