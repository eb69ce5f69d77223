"""What is expected of a request when it comes, for the orders that go by it."""

from admission.ledger import Tariff
from admission.length_predictor import LengthPredictor
from admission.output_length import OutputLengths
from backend.scheduler.sequence import Sequence


class Predicted:
    """Asked once of each sequence, as it arrives: what is learned later changes nobody's place."""

    def __init__(
        self, tariff: Tariff, clock: Tariff, lengths: OutputLengths, predictor: LengthPredictor | None
    ) -> None:
        """`tariff` is in the unit of account, `clock` in seconds of engine time. Without a `predictor` answers are
        expected to be as long as those of their tenant were.
        """
        self._tariff, self._clock = tariff, clock
        self._lengths, self._predictor = lengths, predictor

    def output(self, sequence: Sequence) -> float:
        """Returns the tokens of its answer.

        With a predictor, an answer of a length that none has shown yet has none: a tenant that declares much would have
        more of its requests overtake its oldest (by 7 % on average they were answered earlier).
        """
        tenant, most = sequence.tenant, sequence.max_tokens
        output = None if self._predictor is None else self._predictor.expected(sequence.features)
        if output is None:
            is_known = self._predictor is None or self._lengths.knows(tenant, most)
            output = self._lengths.mean(tenant, most) if is_known else 0.0
        return min(output, most)

    def cost(self, sequence: Sequence) -> float:
        """Returns what all of it costs, in the unit of account."""
        return self._tariff.estimate(len(sequence.prompt), self.output(sequence), sequence.num_pinned_tokens)

    def seconds(self, sequence: Sequence) -> float:
        """Returns the engine time that all of it takes."""
        return self._clock.estimate(len(sequence.prompt), self.output(sequence), sequence.num_pinned_tokens)

    def prefill_seconds(self, sequence: Sequence) -> float:
        """Returns the engine time that its prompt takes."""
        return self._clock.estimate(len(sequence.prompt), 0.0, sequence.num_pinned_tokens)
