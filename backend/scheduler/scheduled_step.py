"""A step from its planning to its completion: the prefill that it may take, its rows, and the tokens it brings."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from backend.scheduler.batch import Batch, NewSequence
from backend.scheduler.sequence import FinishReason, Sequence

Fork = tuple[Sequence, Sequence, int]
"""A sequence that is forked, the one whose prompt it starts from, and the blocks that it had before."""

NewToken = tuple[Sequence, int, FinishReason | None]
"""One token of one sequence, and why the sequence ended if it did."""


class WaitReason(StrEnum):
    """The reason why the head of the queue waits, why a tenant is held, or why a sequence pauses."""

    BATCH = "batch"  # static batching: the batch has to drain
    PEERS = "peers"  # it is to be computed beside others, and fewer are there
    RELEASE = "release"  # memory of preempted sequences is on its way back
    BUDGET = "budget"  # the step is full
    SLOTS = "slots"  # max_num_seqs run
    MEMORY = "memory"  # its tokens, or what those running may still need, do not fit
    ALLOWANCE = "allowance"  # its tenant holds as many blocks as it may
    TOKENS = "tokens"  # it has generated as many tokens as it may for now


class PrefillBudget(Protocol):
    """The prefill that a step may still take."""

    def fits(self, start: int, length: int) -> int:
        """Return how many of `length` tokens behind `start` computed ones the step can carry."""
        ...

    def take(self, start: int, length: int) -> None:
        """Spend the budget on `length` tokens behind `start` computed ones."""
        ...

    def copies(self, due: float, free: int, rate: float) -> None:
        """Note that the step copies `due` blocks as far as it is planned. Each block that it allocates from now on
        beyond `free` is expected to take `rate` more copies.
        """
        ...

    def fits_back(self, start: int, blocks: int) -> int:
        """Return how many of these blocks, which follow on `start` computed tokens, the step can copy back."""
        ...


class FixedPrefillBudget:
    """A budget of a fixed number of tokens, regardless of their context."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def fits(self, start: int, length: int) -> int:
        return max(0, min(length, self._tokens))

    def take(self, start: int, length: int) -> None:
        self._tokens -= length

    def copies(self, due: float, free: int, rate: float) -> None:
        pass

    def fits_back(self, start: int, blocks: int) -> int:
        return blocks


@dataclass(slots=True)
class ScheduledStep:
    """A step between planning and completion: the batch, and the sequences of its rows."""

    batch: Batch
    sequences: list[Sequence] = field(default_factory=list)  # by row
    sampled: list[Sequence] = field(default_factory=list)  # whose tokens those of `Batch.sampled` are
    admitted: list[Sequence] = field(default_factory=list)
    billed: list[tuple[Sequence, int]] = field(default_factory=list)  # prompt tokens not computed before
    paused: dict[Sequence, WaitReason] = field(default_factory=dict)  # at a limit of their tenants
    ended: list[tuple[Sequence, FinishReason]] = field(default_factory=list)  # by its tokens, once they are known
    failed: list[Sequence] = field(default_factory=list)  # those for which the model computed no numbers
    jumped: dict[Sequence, int] = field(default_factory=dict)  # forced tokens, taken with those that were sampled
    hits: list[tuple[Sequence, int, list[int]]] = field(default_factory=list)  # cached blocks and their places
    leaders: dict[str, int] = field(default_factory=dict)  # by prompt group, the row that computes of the prompt
    forks: list[Fork] = field(default_factory=list)
    recomputed_tokens: int = 0  # that a preemption had lost
    decode_context: int = 0  # tokens that the decodes attend to, in all
    planned_at: float = 0.0  # seconds, of the scheduler's owner's clock
    planning: float = 0.0  # seconds of planning it, for measurements

    @classmethod
    def empty(cls, step: int) -> "ScheduledStep":
        """Return a step without rows. Its lists are made here, because a dataclass takes twice as long to make them."""
        return cls(Batch(step, 0, [], [], [], [], [], [], []), [], [], [], [], {}, [], [], {}, [], {}, [])

    @property
    def num_tokens(self) -> int:
        return sum(self.batch.lengths)

    @property
    def named(self) -> list[Sequence]:
        """The sequences that the step names: those of its rows, and those that are forked."""
        return [*self.sequences, *[sequence for sequence, _, _ in self.forks]] if self.forks else self.sequences

    def has_brought_first(self, sequence: Sequence) -> bool:
        """Return True if the step, now that its tokens are known, has brought the first one of the sequence."""
        return len(sequence.output) == 1 + self.jumped.get(sequence, 0)

    def admit(self, sequence: Sequence) -> None:
        """Note that a sequence has just taken its slot, for the device as well."""
        self.admitted.append(sequence)
        self.batch.admitted.append(new_sequence(sequence))

    def add_hit(self, sequence: Sequence, index: int, blocks: list[int]) -> None:
        """Note that blocks with a prefix that was computed already are in a sequence's table, from `index` on."""
        self.hits.append((sequence, index, blocks))
        self.batch.new_blocks.append((sequence.slot, index, blocks))

    def drop_hits(self, slot: int) -> None:
        """Tell the device nothing of the hits of who had a slot that is free, and was preempted before it had a row."""
        self.batch.new_blocks[:] = [told for told in self.batch.new_blocks if told[0] != slot]

    def add_decodes(self, sequences: list[Sequence]) -> None:
        """Add rows for the next token of each of these, behind the decodes that there are, before all prefills."""
        batch, first, count = self.batch, self.batch.num_decodes, len(sequences)
        starts = [sequence.num_computed_tokens for sequence in sequences]
        batch.slots[first:first] = [sequence.slot for sequence in sequences]
        batch.starts[first:first] = starts
        batch.lengths[first:first] = [1] * count
        batch.sampled = [*range(first + count), *[row + count for row in batch.sampled[first:]]]
        batch.forks = [(index + count, slot) for index, slot in batch.forks]
        batch.num_decodes = first + count
        self.sequences[first:first] = sequences
        self.sampled[first:first] = sequences
        self.leaders = {group: row + count for group, row in self.leaders.items()}
        self.decode_context += sum(starts) + count
        for sequence in sequences:
            sequence.num_computed_tokens += 1
            sequence.num_tokens += 1
            sequence.last_step = batch.step

    def add_prefill(self, sequence: Sequence, length: int) -> None:
        """Add a row that computes the next `length` tokens of a prompt, or of what is recomputed.

        A chunk that reaches the sequence's last token samples the one after it.
        """
        batch, start = self.batch, sequence.num_computed_tokens
        row = len(batch.slots)
        batch.slots.append(sequence.slot)
        batch.starts.append(start)
        batch.lengths.append(length)
        batch.token_ids += sequence.tokens_at(start, length)
        self.sequences.append(sequence)
        sequence.num_computed_tokens = start + length
        self._bill(sequence)
        self.recomputed_tokens += length - sequence.num_new_tokens(start, length)
        is_complete = sequence.num_computed_tokens == sequence.num_tokens
        group = sequence.prompt_group
        if (
            group is not None
            and sequence.num_tokens == len(sequence.prompt)
            and (is_complete or group not in self.leaders)
        ):
            self.leaders[group] = row
        if is_complete:
            self._sample(sequence, row)
        sequence.last_step = batch.step

    def add_fork(self, sequence: Sequence, row: int, num_blocks: int) -> None:
        """Have the row that completes a prompt sample for another sequence as well, which has the prompt's blocks by
        now; it had `num_blocks` of them before.
        """
        batch, leader, table = self.batch, self.sequences[row], sequence.block_table
        batch.new_blocks.append((sequence.slot, num_blocks, table[num_blocks:]))
        last = len(table) - 1
        if table[last] != leader.block_table[last]:
            batch.block_copies.append((leader.block_table[last], table[last]))
        batch.forks.append((len(batch.sampled), sequence.slot))
        self.forks.append((sequence, leader, num_blocks))
        self._sample(sequence, row)
        sequence.last_step = batch.step

    def _sample(self, sequence: Sequence, row: int) -> None:
        sequence.num_tokens += 1
        self.batch.sampled.append(row)
        self.sampled.append(sequence)

    def _bill(self, sequence: Sequence) -> None:
        """Count the prompt tokens that are computed for the first time: a recompute is not the tenant's doing."""
        tokens = min(sequence.num_computed_tokens, len(sequence.prompt)) - sequence.num_prefilled_tokens
        if tokens > 0:
            sequence.num_prefilled_tokens += tokens
            self.billed.append((sequence, tokens))

    def undo(self) -> None:
        """Set the sequences back to where they were before this step, the newest in flight, which was not computed."""
        for sequence, start in zip(self.sequences, self.batch.starts, strict=True):
            sequence.num_computed_tokens = start
            sequence.last_step = -1
        for sequence, _, _ in self.forks:
            sequence.last_step = -1
        for sequence in self.sampled:
            if sequence.num_redundant:
                sequence.num_redundant -= 1
            else:
                sequence.num_tokens -= 1
        for sequence, tokens in self.billed:
            sequence.num_prefilled_tokens -= tokens


def new_sequence(sequence: Sequence) -> NewSequence:
    """Return what the device is told of a sequence that has just taken its slot, or has sampled nothing since."""
    tokens = [*sequence.prompt, *sequence.output]
    return NewSequence(sequence.slot, sequence.sampling, sequence.seed, tokens, len(sequence.prompt))
