"""Tokens of one sequence as text for one client."""

from admission.admission import Admission
from backend.scheduler.sequence import FinishReason, Sequence
from backend.stream import TokenStream
from backend.text.detokenizer import IncrementalDetokenizer
from gateway.errors import DeadlineExceeded, ModelFailed, Preempted
from gateway.openai.replies import Choice
from gateway.telemetry.metrics.metrics import Metrics


class Answer:
    """The text of one sequence as its tokens come: one piece for each token that completes any text."""

    def __init__(
        self, stream: TokenStream, detokenizer: IncrementalDetokenizer, admission: Admission, metrics: Metrics
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0  # delivered: those sampled after a stop string are not
        self._delivered_at = 0.0
        self.stream = stream
        self._detokenizer = detokenizer
        self._admission = admission
        self._metrics = metrics

    @property
    def num_computed(self) -> int:
        """Tokens that its tenant pays for: those delivered, or all that were generated until it was cut short."""
        return self.num_tokens if self.finish_reason is not None else len(self.stream.sequence.output)

    @property
    def sequence(self) -> Sequence:
        return self.stream.sequence

    async def pieces(self) -> list[str]:
        """Wait for tokens and return their text; the answer is complete when `finish_reason` is set.

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
                self._admission.stop(self.stream)
                return pieces
        if self.stream.finish_reason is not None:
            pieces.append(self._end())
        return pieces

    async def choice(self) -> Choice:
        """The whole text. Only a stop string could end it early, so only then is every token looked at as it comes."""
        pieces: list[str] = []
        self.stream.eager = self._detokenizer.may_stop
        while self.finish_reason is None:
            pieces += await (self.pieces() if self.stream.eager else self._whole())
        return Choice("".join(pieces), "length" if self.finish_reason is FinishReason.LENGTH else "stop")

    async def _whole(self) -> list[str]:
        """All that has come, in one piece."""
        tokens = await self._take()
        self.num_tokens += len(tokens)
        text = self._detokenizer.push(tokens)
        return [text] if self.stream.finish_reason is None else [text, self._end()]

    async def _take(self) -> list[int]:
        tokens = await self.stream.take()
        match self.stream.finish_reason:
            case FinishReason.PREEMPTED:
                raise Preempted
            case FinishReason.FAILED:
                raise ModelFailed
            case FinishReason.EXPIRED:
                raise DeadlineExceeded("the deadline of the request passed before it could be met")
        self._delivered_at = self._metrics.tokens_delivered(
            self.stream.sequence, self.num_tokens, len(tokens), self._delivered_at
        )
        return tokens

    def _end(self) -> str:
        """The sequence has ended: the text that was held back, in which a stop string may be complete only now."""
        rest = self._detokenizer.finish()
        stopped = self._detokenizer.stopped is not None
        self.finish_reason = FinishReason.STOP if stopped else self.stream.finish_reason
        return rest
