"""Writes one streamed choice of an answer to its client."""

from collections.abc import Callable
from functools import partial

from gateway import sse
from gateway.api.text_stream import TextStream
from gateway.http.request_scope import Exchange
from gateway.http.responses import ResponseWriter
from gateway.openai.replies import Ending, StreamEncoder, TokenUsage


class Progress:
    """Counts the written tokens of an answer's choices and tells a router the number after each write, so that the
    router knows the delivered part if this process is lost.
    """

    __slots__ = ("_num_tokens",)

    def __init__(self) -> None:
        self._num_tokens = 0

    def after(self, more: int) -> bytes:
        self._num_tokens += more
        return sse.progress(self._num_tokens)


class ChoiceWriter:
    """Writes one choice's events. The tokens that are pending when a write is due share it, and with `continuous_usage`
    one event, with the number of tokens that the choice has by then.

    Once the stream has begun, text is written right where tokens are delivered, by a plain call. Writes that may
    wait or end the stream are the coroutine's: the first token and the last, text in which a stop string may be
    complete, text that a guardrail judges, and all text while the client reads too slowly.
    """

    __slots__ = ("_chunks", "_num_written", "_progress", "_response", "_text", "_usage")

    def __init__(
        self,
        response: ResponseWriter,
        text: TextStream,
        chunks: StreamEncoder,
        continuous_usage: bool,
        progress: Progress | None = None,
    ) -> None:
        """With `progress`, shared by the choices of an answer, each write ends with a comment that tells the number of
        tokens written.
        """
        self._progress = progress
        self._num_written = 0  # tokens
        self._response = response
        self._text = text
        self._chunks = chunks
        self._usage = TokenUsage(text.sequence.num_prompt_tokens, 0) if continuous_usage else None

    async def write_all(self) -> None:
        await self._response.stream(self._with_progress(await self.write_but_end()))

    async def write_but_end(self) -> bytes:
        """Write all events but the last ones, which are returned: they share a write with the end of the stream."""
        text, receiver, events = self._text, None, self._start()
        while text.finish_reason is None:
            events += await self._next_events(receiver)
            if events and text.finish_reason is None:
                await self._response.stream(self._with_progress(events))
                events = b""
                if self._response.exchange is not None and not text.may_stop and text.guardrail is None:
                    receiver = partial(self._write_pending, self._response.exchange)
        return events + self._finish()

    def _start(self) -> bytes:
        return self._chunks.start(self._usage)

    async def _next_events(self, receiver: Callable[[], bool] | None) -> bytes:
        """Wait for text and return its events. A `receiver` is called as by `TextStream.pieces`."""
        return self._events(await self._text.pieces(receiver))

    def _finish(self) -> bytes:
        return self._chunks.finish(Ending(self._text.told_reason, self._usage, None, self._text.stop_string))

    def _write_pending(self, exchange: Exchange) -> bool:
        """Write the pending text; if that might block, take nothing and return False."""
        if not exchange.is_writable:
            return False
        if events := self._events(self._text.push(self._text.tokens.rest())):
            exchange.write(events if self._progress is None else self._with_progress(events))
        return True

    def _with_progress(self, events: bytes) -> bytes:
        """The events of one write, with the progress comment behind them if one is due."""
        if self._progress is None:
            return events
        more, self._num_written = self._text.num_tokens - self._num_written, self._text.num_tokens
        return events + self._progress.after(more)

    def _events(self, pieces: list[str]) -> bytes:
        """The events of these pieces, one each; none while text that is parsed is held back."""
        if self._usage is None:
            return b"".join(map(self._chunks.text, pieces))
        self._note_usage(self._usage)
        return self._chunks.text("".join(pieces), self._usage) if pieces else b""

    def _note_usage(self, usage: TokenUsage) -> None:
        usage.completion_tokens = self._text.num_tokens
        usage.cached_tokens = self._text.sequence.num_cached_tokens
