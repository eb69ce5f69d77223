"""The text of one answer, as its tokens come."""

import asyncio
from collections.abc import Callable

from backend.scheduler.sequence import FinishReason
from backend.stream import TokenStream
from backend.text.detokenizer import IncrementalDetokenizer
from gateway.api.engine_client import Generation
from gateway.api.guardrail import AnswerGuardrail
from gateway.errors import DeadlineExceeded, ModelFailed, Preempted
from gateway.grammar_errors import NoTokenAllowed
from gateway.openai.answer_message import AnswerMessage
from gateway.openai.replies import Choice, ReplyFinishReason
from gateway.telemetry.metrics.delivery import DeliveryMetrics

PARSED_TOKENS_PER_TURN = 256  # tokens of an answer that is parsed when it is whole: a millisecond or two


class TextStream:
    """Yields the text of one sequence as its tokens come: one piece for each token that completes any text."""

    def __init__(
        self,
        tokens: TokenStream,
        detokenizer: IncrementalDetokenizer,
        generation: Generation,
        deliveries: DeliveryMetrics,
        message: AnswerMessage | None = None,
    ) -> None:
        """`message`: the message that the text is parsed into."""
        self.finish_reason: FinishReason | None = None
        self.guardrail: AnswerGuardrail | None = None  # of a stream
        self.num_tokens = 0  # delivered, which tokens behind a stop string are not
        self._delivered_at = 0.0
        self._kept: list[int] = []  # delivered and not yet decoded
        self._is_call_cut = False  # by the client's stop string
        self.tokens = tokens
        self.sequence = tokens.sequence
        self.message = message
        self.may_stop = detokenizer.may_stop or (message is not None and message.is_single)
        self._detokenizer = detokenizer
        self._generation = generation
        self._deliveries = deliveries

    async def pieces(self, receiver: Callable[[], bool] | None = None) -> list[str]:
        """Wait for tokens and return their text, in pieces that are not empty; with a guardrail as one piece, once it
        is allowed. The stream is complete once `finish_reason` is set. A `receiver` is called as by `TokenStream.take`.

        Raises `Preempted` when the sequence lost its memory for good, `DeadlineExceeded` when its time is over,
        `ModelFailed` when the model computed no numbers for it, and `DeviceError` when the engine failed; with a
        guardrail `GuardrailRefused` and `GuardrailUnavailable`.
        """
        if self.guardrail is None:
            return await self._pieces(receiver)
        held, num_chars = list[str](), 0
        while self.finish_reason is None and num_chars < self.guardrail.hold:
            pieces = await self._pieces()
            held += pieces
            num_chars += sum(map(len, pieces))
        text = "".join(held)
        await self.guardrail.check(text, is_last=self.finish_reason is not None)
        return [text] if text else []

    async def _pieces(self, receiver: Callable[[], bool] | None = None) -> list[str]:
        pieces = self.push(await self._take(receiver))
        if self.finish_reason is None and self.tokens.finish_reason is not None and (rest := self._finish()):
            pieces.append(rest)
        return pieces

    def push(self, tokens: list[int]) -> list[str]:
        """Return the text of these tokens, in pieces that are not empty. A stop string sets `finish_reason`."""
        message, count = self.message, len(tokens)
        self._delivered_at = self._deliveries.delivered(self.sequence, self.num_tokens, count, self._delivered_at)
        if message is None and not self.may_stop:
            self.num_tokens += count
            return self._detokenizer.push_each(tokens)
        pieces: list[str] = []
        for token_id in tokens:
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,))
            if text:
                pieces.append(text)
            if message is not None:
                message.push(text)
            if self._detokenizer.stopped is not None or (message is not None and message.is_over):
                self.finish_reason = FinishReason.STOP
                self._generation.stop(self.tokens, self.num_tokens)
                if message is not None:
                    self._is_call_cut = message.is_in_call and not message.is_over
                    message.finish()
                break
        return pieces

    async def choice(self) -> Choice:
        """Wait for the whole text. Tokens are decoded as they come only if a stop string could end it early."""
        pieces: list[str] = []
        self.tokens.eager = self.may_stop
        while self.finish_reason is None:
            pieces += await (self._pieces() if self.tokens.eager else self._all())
        choice = Choice("".join(pieces), self.told_reason, stop_string=self.stop_string)
        if self.message is not None:
            choice.message, choice.blocks = self.message.members(), self.message.blocks()
        return choice

    @property
    def told_reason(self) -> ReplyFinishReason:
        """The finish reason of a complete text, as its client is told. A call that a stop string cut is no call."""
        if self.finish_reason is FinishReason.LENGTH:
            return "length"
        has_calls = self.message is not None and self.message.has_calls
        return "tool_calls" if has_calls and not self._is_call_cut else "stop"

    @property
    def stop_string(self) -> str | None:
        """The stop string that ended the text; None if another cause did."""
        return self._detokenizer.stopped

    async def _all(self) -> list[str]:
        """Wait for the last token and return the whole text; earlier tokens are taken by a plain call."""
        while True:
            self._keep(await self._take(self._keep_pending))
            if self.tokens.finish_reason is not None:
                return [await self._kept_text(), self._finish()]

    async def _kept_text(self) -> str:
        if self.message is None:
            return self._detokenizer.push(self._kept)
        pieces: list[str] = []
        for count, token_id in enumerate(self._kept, 1):
            pieces.append(self._detokenizer.push((token_id,)))
            self.message.push(pieces[-1])
            if not count % PARSED_TOKENS_PER_TURN:
                await asyncio.sleep(0)  # others have their turn
        return "".join(pieces)

    def _keep_pending(self) -> bool:
        self._keep(self.tokens.rest())
        return True

    def _keep(self, tokens: list[int]) -> None:
        """Count tokens that are decoded with the last one."""
        count = len(tokens)
        self._delivered_at = self._deliveries.delivered(self.sequence, self.num_tokens, count, self._delivered_at)
        self.num_tokens += count
        self._kept += tokens

    async def _take(self, receiver: Callable[[], bool] | None = None) -> list[int]:
        tokens = await self.tokens.take(receiver)
        if self.tokens.finish_reason is not None:
            _check_complete(self.tokens.finish_reason)
        return tokens

    def _finish(self) -> str:
        """End the stream and return the text held back, in which a stop string may be complete only now."""
        rest = self._detokenizer.flush()
        stopped = self._detokenizer.stopped is not None
        self.finish_reason = FinishReason.STOP if stopped else self.tokens.finish_reason
        if self.message is not None:
            is_stopped = stopped or not self.message.stop_tokens.isdisjoint(self.sequence.output[-1:])
            self._is_call_cut = is_stopped and self.message.is_in_call
            self.message.finish(rest, is_cut=self.finish_reason is FinishReason.LENGTH)
        return rest


def _check_complete(reason: FinishReason) -> None:
    """Raise the error that cut the sequence short, if one did."""
    match reason:
        case FinishReason.PREEMPTED:
            raise Preempted
        case FinishReason.FAILED:
            raise ModelFailed
        case FinishReason.GRAMMAR:
            raise NoTokenAllowed
        case FinishReason.EXPIRED:
            raise DeadlineExceeded("The deadline of the request passed before it could be met.")
