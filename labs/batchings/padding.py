"""Padding of a static batch, whose rows are all as long as the longest.

An engine with batches as tensors [rows, tokens] pads prompts to the longest, begins to decode after the last prompt,
and keeps the rows of finished answers until the last has ended: FasterTransformer and the servers of its time, the
baseline of continuous batching (Yu et al., 2022). `Batching.STATIC` is the best case of that engine, with packed
prompts and rows that end; `Batching.STATIC_PADDED` is the engine as it was.
"""

from collections.abc import Mapping
from operator import attrgetter

from backend.config import EngineConfig
from backend.scheduler.batch import Batch, Counters
from backend.scheduler.scheduled_step import ScheduledStep
from backend.scheduler.sequence import Sequence

_NUM_COMPUTED = attrgetter("num_computed_tokens")  # planned: a row attends to all tokens of its step


class Padding:
    """Adds padding to the steps of successive batches: tokens that attend to the longest running sequence, with
    discarded results.
    """

    def __init__(self, config: EngineConfig, running: Mapping[str, Sequence], counters: Counters) -> None:
        """`running` holds the unfinished sequences of the batch."""
        self._running, self._most, self._counters = running, config.max_num_batched_tokens, counters
        self._num_rows = 0  # of the batch
        self._due: list[int] = []  # uncomputed padding tokens of each prompt

    def prefilling(self) -> list[Sequence]:
        """Return the prefilling sequences: a padded batch decodes only after the last."""
        return [s for s in self._running.values() if s.num_computed_tokens < s.num_admitted_tokens and not s.jumps]

    def room(self, prefilling: list[Sequence], room: int) -> int:
        """Return the prompts' share of `room`, so that prompts and their padding end together."""
        left, due = sum([sequence.num_uncomputed_tokens for sequence in prefilling]), sum(self._due)
        return max(1, room * left // (left + due)) if left and due else room

    def add(self, scheduled: ScheduledStep) -> None:
        """Add the padding of a step, the first of a batch included: at most as many rows again as the batch has."""
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
        """Add a row of at most `length` tokens, as far as the step has room; return its length."""
        length = max(0, min(length, self._most - batch.num_tokens))
        if length:
            batch.padding.append((slot, start, length))
            self._counters.padding_tokens += length
        return length
