"""Memory for answers as long as they are predicted to be: S³ (Jin, Wu, Brooks and Wei, NeurIPS 2023).

A sequence is given memory for its prompt and for its answer up to the end of the bucket that the predicted length falls
into, of `BUCKETS` between nothing and what it declared. It joins when that fits beside what those running were given.
One that outgrows its part is given twice as much, and is the first to be preempted when memory runs out. The paper
packs a batch by first fit decreasing; here the order is that of the queue, which `--order` chooses, and nobody who fits
overtakes one who does not: large requests would starve. Its predictor is a fine-tuned DistilBERT; here it is the
one that the fair order ranks by.
"""

from collections.abc import Callable, Iterable

from backend.config import EngineConfig
from backend.scheduler.sequence import Sequence

BUCKETS = 10


class PredictedLength:
    """Admits what fits beside the memory that those running were given, used or not."""

    def __init__(self, config: EngineConfig, predict: Callable[[Sequence], float]) -> None:
        """`predict` returns the expected length of an answer, in tokens."""
        self._blocks_for, self._predict = config.blocks_for, predict
        self._lengths: dict[Sequence, int] = {}  # of answers, for which there is memory

    def __call__(
        self, sequence: Sequence, running: Iterable[Sequence], num_free: int, num_held: int, num_kept: int
    ) -> bool:
        everyone = [sequence, *running]
        self._lengths = {one: self._length(one) for one in everyone}
        given = [self._blocks_for(len(one.prompt) + length) for one, length in self._lengths.items()]
        unused = [max(0, blocks - len(one.block_table)) for one, blocks in zip(everyone, given, strict=True)]
        return sum(unused) - num_held <= num_free

    def outgrew(self, sequence: Sequence) -> bool:
        """Returns True if its answer has become longer than what it was given memory for."""
        length = self._lengths.get(sequence)
        return length is not None and sequence.num_tokens > len(sequence.prompt) + length

    def _length(self, sequence: Sequence) -> int:
        """Returns for how many tokens of its answer a sequence is given memory."""
        width = -(-sequence.max_tokens // BUCKETS)
        length = self._lengths.get(sequence) or width * max(1, -(-int(self._predict(sequence)) // width))
        while len(sequence.prompt) + length < sequence.num_tokens:
            length *= 2
        return min(length, sequence.max_tokens)
