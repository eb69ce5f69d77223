"""A step between its planning and its completion, and what comes of both."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from backend.scheduler.batch import Admitted, Batch
from backend.scheduler.sequence import FinishReason, Sequence

Delta = tuple[Sequence, int, FinishReason | None]
"""One token of one sequence, and why the sequence ended if it did."""


class Blocked(StrEnum):
    """Why the head of the queue waits, a tenant is passed over, or a sequence pauses."""

    BATCH = "batch"  # static batching: the batch has to drain
    RELEASE = "release"  # memory of preempted sequences is on its way back
    BUDGET = "budget"  # the step is full
    SLOTS = "slots"  # max_num_seqs run
    MEMORY = "memory"  # its tokens, or what those running may still need, do not fit
    ALLOWANCE = "allowance"  # its tenant holds as many blocks as it may
    TOKENS = "tokens"  # it has generated as many tokens as it may for now


@dataclass(slots=True)
class ScheduledStep:
    """A step between planning and completion: the batch, and whose its rows are."""

    batch: Batch
    sequences: list[Sequence] = field(default_factory=list)
    sampled: list[Sequence] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    billed: list[tuple[Sequence, int]] = field(default_factory=list)  # prompt tokens not computed before
    paused: dict[Sequence, Blocked] = field(default_factory=dict)  # at a limit of their tenants
    decode_context: int = 0  # tokens that the decodes attend to, in all
    planned_at: float = 0.0  # seconds, of the scheduler's owner's clock
    planning: float = 0.0  # seconds that planning it took, for whoever measures that

    @property
    def num_tokens(self) -> int:
        return sum(self.batch.lengths)

    def undo(self) -> None:
        """It was planned last of those in flight and not computed: its sequences are as far as they were before it."""
        for sequence, start in zip(self.sequences, self.batch.starts, strict=True):
            sequence.num_computed_tokens = start
            sequence.in_flight -= 1
            sequence.last_step = -1
        for sequence in self.sampled:
            sequence.num_tokens -= 1
        for sequence, tokens in self.billed:
            sequence.num_billed_tokens -= tokens


def introduce(sequence: Sequence) -> Admitted:
    """A sequence that has just taken its slot, or has sampled nothing since."""
    tokens = [*sequence.prompt, *sequence.output]
    return Admitted(sequence.slot, sequence.sampling, sequence.seed, tokens, len(sequence.prompt))


class Retelling:
    """Sequences of which the device may not know all that was planned, because steps that said so were lost."""

    def __init__(self) -> None:
        self._untold: list[Sequence] = []

    def begin(self, running: Iterable[Sequence]) -> None:
        self._untold = list(running)

    def add_to(self, scheduled: ScheduledStep) -> None:
        """Tell, ahead of what the step itself has to tell: of those that still hold a slot, be it for this step alone,
        all blocks, and who they are if they have sampled nothing yet.
        """
        if not self._untold:
            return
        kept = [s for s in self._untold if s.slot >= 0 and s not in scheduled.admitted]
        prefilling = [s for s in kept if len(s.prompt) + len(s.output) == s.num_admitted_tokens]
        scheduled.batch.admitted[:0] = [introduce(s) for s in prefilling]
        scheduled.batch.new_blocks[:0] = [(s.slot, 0, list(s.block_table)) for s in kept]
        self._untold = []
