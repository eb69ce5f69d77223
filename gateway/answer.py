"""Tokens of one sequence as text for one client."""

from admission.admission import Admission
from backend.detokenizer import IncrementalDetokenizer
from backend.sequence import FinishReason
from backend.stream import TokenStream
from gateway.errors import Preempted
from gateway.metrics import Metrics
from gateway.replies import Choice


class Answer:
    """The text of one sequence as its tokens come: one piece for each token that completes any text."""

    def __init__(
        self, stream: TokenStream, detokenizer: IncrementalDetokenizer, admission: Admission, metrics: Metrics
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0  # delivered: those sampled after a stop string are not
        self._delivered_at = 0.0
        self._stream = stream
        self._detokenizer = detokenizer
        self._admission = admission
        self._metrics = metrics

    async def pieces(self) -> list[str]:
        """Wait for tokens and return their text; the answer is complete when `finish_reason` is set.

        Raises `Preempted` when the sequence lost its memory for good, `DeviceError` when the engine failed.
        """
        tokens = await self._stream.take()
        if self._stream.finish_reason is FinishReason.PREEMPTED:
            raise Preempted
        self._delivered_at = self._metrics.tokens_delivered(
            self._stream.sequence, self.num_tokens, len(tokens), self._delivered_at
        )
        pieces = []
        for token_id in tokens:
            self.num_tokens += 1
            if piece := self._detokenizer.push((token_id,)):
                pieces.append(piece)
            if self._detokenizer.stopped is not None:
                self.finish_reason = FinishReason.STOP
                self._admission.stop(self._stream)
                return pieces
        if self._stream.finish_reason is not None:
            self.finish_reason = self._stream.finish_reason
            if rest := self._detokenizer.finish():
                pieces.append(rest)
            if self._detokenizer.stopped is not None:
                self.finish_reason = FinishReason.STOP
        return pieces

    async def choice(self) -> Choice:
        """The whole text. Only a stop string could end it early, so only then is every token looked at as it comes."""
        self._stream.eager = self._detokenizer.may_stop
        pieces: list[str] = []
        while self.finish_reason is None:
            pieces += await self.pieces()
        return Choice("".join(pieces), "length" if self.finish_reason is FinishReason.LENGTH else "stop")
