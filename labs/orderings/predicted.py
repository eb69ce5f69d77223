"""The predictions for a request at its arrival, for orders that use them."""

from collections.abc import Sequence as Listed

from admission.core import OrderParts
from backend.scheduler.sequence import FinishReason, Sequence
from labs.orderings.length_predictor import LengthPredictor, features_of


class Predicted:
    """Asked once for each sequence, at its arrival: later learning changes no place."""

    def __init__(self, parts: OrderParts) -> None:
        self._lengths, self._tariffs = parts.lengths, parts.tariffs
        self._predictor = LengthPredictor()

    def output(self, sequence: Sequence) -> float:
        """The expected tokens of its answer; 0 if neither its prompt nor its tenant tells.

        Its declaration is not used: a large one would change places without evidence.
        """
        tenant, most = sequence.tenant, sequence.request.max_tokens
        output = self._predictor.expected(features_of(tenant, sequence.request.prompt, most))
        if output is None:
            output = self._lengths.mean(tenant, most) if self._lengths.knows(tenant, most) else 0.0
        return min(output, most)

    def seconds(self, sequence: Sequence) -> float:
        """The expected engine time of the whole request."""
        return self._tariffs.estimate(sequence, self.output(sequence), sequence.num_found_tokens)

    def learn(self, tenant: str, prompt: Listed[int], max_tokens: int, output: int) -> None:
        self._predictor.observe(features_of(tenant, prompt, max_tokens), output)

    def ended(self, sequence: Sequence) -> None:
        if sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
            self.learn(sequence.tenant, sequence.request.prompt, sequence.request.max_tokens, len(sequence.output))
