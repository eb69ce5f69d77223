"""Turns the tokens of one sequence into the text that its client receives."""

from admission.admission import Admission
from backend.scheduler.sequence import FinishReason, Sequence
from backend.stream import TokenStream
from backend.text.detokenizer import IncrementalDetokenizer
from gateway.errors import DeadlineExceeded, ModelFailed, Preempted
from gateway.openai.replies import Choice
from gateway.telemetry.metrics.metrics import Metrics


class TextStream:
    """Yields the text of one sequence as its tokens come: one piece for each token that completes any text."""

    def __init__(
        self, tokens: TokenStream, detokenizer: IncrementalDetokenizer, admission: Admission, metrics: Metrics
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0  # delivered: those sampled after a stop string are not
        self._delivered_at = 0.0
        self.tokens = tokens
        self._detokenizer = detokenizer
        self._admission = admission
        self._metrics = metrics

    @property
    def num_computed(self) -> int:
        """Returns how many tokens the tenant pays for: those delivered, or all generated ones if it was cut short."""
        return self.num_tokens if self.finish_reason is not None else len(self.tokens.sequence.output)

    @property
    def sequence(self) -> Sequence:
        return self.tokens.sequence

    async def pieces(self) -> list[str]:
        """Wait for tokens and return their text; the stream is complete once `finish_reason` is set.

        Raises `Preempted` when the sequence lost its memory for good, `DeadlineExceeded` when its time is over,
        `ModelFailed` when the model computed no numbers for it, and `DeviceError` when the engine failed.
        """
        pieces = []
        for token_id in await self._take():
            self.num_tokens += 1
            if piece := self._detokenizer.push((token_id,)):
                pieces.append(piece)
            if self._detokenizer.stopped is not None:
                self.finish_reason = FinishReason.STOP
                self._admission.stop(self.tokens)
                return pieces
        if self.tokens.finish_reason is not None:
            pieces.append(self._finish())
        return pieces

    async def choice(self) -> Choice:
        """Wait for the whole text. Tokens are looked at as they come only where a stop string could end it early."""
        pieces: list[str] = []
        self.tokens.eager = self._detokenizer.may_stop
        while self.finish_reason is None:
            pieces += await (self.pieces() if self.tokens.eager else self._all_pending())
        return Choice("".join(pieces), "length" if self.finish_reason is FinishReason.LENGTH else "stop")

    async def _all_pending(self) -> list[str]:
        """Wait for tokens and return the text of all that are pending as one piece."""
        tokens = await self._take()
        self.num_tokens += len(tokens)
        text = self._detokenizer.push(tokens)
        return [text] if self.tokens.finish_reason is None else [text, self._finish()]

    async def _take(self) -> list[int]:
        tokens = await self.tokens.take()
        match self.tokens.finish_reason:
            case FinishReason.PREEMPTED:
                raise Preempted
            case FinishReason.FAILED:
                raise ModelFailed
            case FinishReason.EXPIRED:
                raise DeadlineExceeded("The deadline of the request passed before it could be met.")
        self._delivered_at = self._metrics.tokens_delivered(
            self.tokens.sequence, self.num_tokens, len(tokens), self._delivered_at
        )
        return tokens

    def _finish(self) -> str:
        """End the stream and return the text that was held back, in which a stop string may be complete only now."""
        rest = self._detokenizer.finish()
        stopped = self._detokenizer.stopped is not None
        self.finish_reason = FinishReason.STOP if stopped else self.tokens.finish_reason
        return rest
