"""What a static batch computes for nobody, because all of its rows are as long as its longest.

An engine whose batches are tensors [rows, tokens] pads prompts to the longest of them, begins to decode when all are
computed, and keeps the rows of answers that have ended until the last has: so did FasterTransformer and the servers of
its time, which continuous batching is compared with (Yu et al., 2022). `Batching.STATIC` is what such an engine could
be at best, with packed prompts and rows that end; `Batching.STATIC_PADDED` is what it was.
"""

from collections.abc import Mapping
from operator import attrgetter

from backend.config import EngineConfig
from backend.scheduler.batch import Batch, Counters
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence

_NUM_COMPUTED = attrgetter("num_computed_tokens")  # as planned: a row attends to all tokens that its step computes


class Padding:
    """Adds padding to the steps of one batch after another: tokens that attend to the longest sequence that runs, and
    of which nothing is kept.
    """

    def __init__(self, config: EngineConfig, running: Mapping[str, Sequence], counters: Counters) -> None:
        """`running` are the sequences of the batch that have not ended."""
        self._running, self._most, self._counters = running, config.max_num_batched_tokens, counters
        self._num_rows = 0  # of the batch
        self._due: list[int] = []  # tokens of its prompts' padding that are not computed yet

    def prefilling(self) -> list[Sequence]:
        """Return those whose prompts are being computed: a padded batch decodes behind all of that."""
        return [s for s in self._running.values() if s.num_computed_tokens < s.num_admitted_tokens and not s.jumps]

    def room(self, prefilling: list[Sequence], room: int) -> int:
        """Return how many of a step's tokens the batch's prompts get, so that they and their padding end together."""
        left, due = sum([sequence.num_uncomputed_tokens for sequence in prefilling]), sum(self._due)
        return max(1, room * left // (left + due)) if left and due else room

    def add(self, scheduled: ScheduledStep) -> None:
        """Add to a step, the first of a batch included, what it computes for nobody: at most as many rows again as the
        batch has.
        """
        batch = scheduled.batch
        if scheduled.admitted and len(scheduled.admitted) == len(self._running):
            lengths = [len(admitted.token_ids) for admitted in batch.admitted]
            self._num_rows = len(lengths)
            self._due = [max(lengths) - length for length in lengths]
        longest = max(self._running.values(), key=_NUM_COMPUTED, default=None)
        if longest is None or not longest.num_computed_tokens:
            return
        context = longest.num_computed_tokens
        if batch.num_decodes:
            for _ in range(self._num_rows - len(batch.slots)):
                self._add(batch, longest.slot, context - 1, 1)
        for index, due in enumerate(self._due):
            if due:
                self._due[index] -= self._add(batch, longest.slot, 0, min(due, context))

    def _add(self, batch: Batch, slot: int, start: int, length: int) -> int:
        """Add a row of `length` tokens, as far as the step has room; returns its length."""
        length = max(0, min(length, self._most - batch.num_tokens))
        if length:
            batch.padding.append((slot, start, length))
            self._counters.padding_tokens += length
        return length
