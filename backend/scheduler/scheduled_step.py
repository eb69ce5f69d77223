"""A scheduled step, from its plan to its completion: its prefill budget, its rows and its new tokens."""

from collections.abc import Sequence as Listed
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

from backend.scheduler.batch import Batch, NewSequence
from backend.scheduler.sequence import FinishReason, Sequence

Fork = tuple[Sequence, Sequence, int]
"""A forked sequence, its leader, and the number of its blocks before the fork."""

NewToken = tuple[Sequence, int, FinishReason | None]
"""A token of a sequence, and the reason if the sequence ended with it."""


class WaitReason(StrEnum):
    """The reason why the head of the queue waits, why a tenant is held, or why a sequence pauses."""

    BATCH = "batch"  # static batching: the batch has to drain
    PEERS = "peers"  # too few sequences to batch it with
    RELEASE = "release"  # memory of preempted sequences is being freed
    BUDGET = "budget"  # the step is full
    SLOTS = "slots"  # max_num_seqs run
    MEMORY = "memory"  # its tokens, or the remaining need of running sequences, do not fit
    MODEL = "model"  # the step is another model's turn
    ADAPTER = "adapter"  # the step brings other adapters to the device already
    ALLOWANCE = "allowance"  # its tenant's allowance of blocks is used up
    TOKENS = "tokens"  # it has reached its `token_limit`


class PrefillBudget:
    """The prefill that a step may still take: a number of tokens, regardless of their context."""

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def fits(self, start: int, length: int) -> int:
        """Return how many of `length` tokens behind `start` computed ones fit the step."""
        return max(0, min(length, self.tokens))

    def spend(self, start: int, length: int) -> None:
        """Spend the budget on `length` tokens behind `start` computed ones."""
        self.tokens -= length

    def copies(self, due: float, free: int, rate: float) -> None:
        """Take account of the `due` blocks that the step, as planned so far, copies, if this budget is of time. Each
        block allocated from now on beyond `free` is expected to cost `rate` more copies.
        """

    def fits_back(self, end: int, blocks: int) -> int:
        """Return how many of `blocks` the step can copy back, with which `end` tokens are computed."""
        return blocks


class SpareStep(Protocol):
    """The rest of a step for the spare class, computed from predicted step times."""

    def num_decodes(self, contexts: Listed[int]) -> int:
        """Return how many of these decodes fit, in order, each with its attended tokens."""
        ...

    def prefill_budget(self, num_decodes: int, decode_context: int, tokens: int) -> PrefillBudget:
        """Return the prefill budget, at most `tokens`, beside that many decodes of the spare class."""
        ...


class FixedSpareStep:
    """All of a step's tokens, without a limit of time."""

    def num_decodes(self, contexts: Listed[int]) -> int:
        return len(contexts)

    def prefill_budget(self, num_decodes: int, decode_context: int, tokens: int) -> PrefillBudget:
        return PrefillBudget(tokens)


@dataclass(slots=True)
class ScheduledStep:
    """A step between planning and completion: the batch, and the sequences of its rows."""

    batch: Batch
    sequences: list[Sequence] = field(default_factory=list)  # by row
    sampled: list[Sequence] = field(default_factory=list)  # the sequence of each row in `Batch.sampled`
    admitted: list[Sequence] = field(default_factory=list)
    billed: list[tuple[Sequence, int]] = field(default_factory=list)  # prompt tokens not computed before
    paused: dict[Sequence, WaitReason] = field(default_factory=dict)  # at a limit of their tenants
    ended: list[tuple[Sequence, FinishReason]] = field(default_factory=list)  # by its new tokens, set at completion
    failed: list[Sequence] = field(default_factory=list)  # sequences without finite logits
    jumped: dict[Sequence, int] = field(default_factory=dict)  # tokens accepted beside the sampled ones
    drafts: dict[Sequence, int] = field(default_factory=dict)  # drafted tokens of rows that `Drafting` takes
    hits: list[tuple[Sequence, int, list[int]]] = field(default_factory=list)  # first index, cached blocks
    leaders: dict[str, int] = field(default_factory=dict)  # by prompt group, the row that prefills the prompt
    forks: list[Fork] = field(default_factory=list)
    recomputed_tokens: int = 0  # tokens lost by preemptions
    decode_context: int = 0  # tokens that the decodes attend to, in total
    spare_decodes: int = 0  # decodes of the spare class, the last of all
    spare_context: int = 0  # tokens that these attend to
    planned_at: float = 0.0  # seconds on the owner's clock
    planning: float = 0.0  # seconds spent planning it, for measurements

    @property
    def num_tokens(self) -> int:
        return sum(self.batch.lengths)

    @property
    def decoding(self) -> tuple[int, int]:
        """The decodes, rows with drafts included, and the tokens that they attend to, in total."""
        count, context, batch = self.batch.num_decodes, self.decode_context, self.batch
        for row in range(count, len(batch.slots)) if self.drafts else ():
            if self.sequences[row] in self.drafts:
                count, context = count + 1, context + batch.starts[row] + batch.lengths[row]
        return count, context

    @property
    def named(self) -> list[Sequence]:
        """The sequences of its rows and its forks."""
        return [*self.sequences, *[sequence for sequence, _, _ in self.forks]] if self.forks else self.sequences

    def count_spare(self) -> None:
        """Count the decodes of the spare class, once all decodes are planned."""
        decodes = zip(self.sequences, self.batch.starts, strict=True)
        spare = [start + 1 for sequence, start in decodes if sequence.is_spare]
        self.spare_decodes, self.spare_context = len(spare), sum(spare)

    def has_brought_first(self, sequence: Sequence) -> bool:
        """Return True if the completed step produced the first output token of the sequence."""
        return len(sequence.output) == 1 + self.jumped.get(sequence, 0)

    def add_admission(self, sequence: Sequence) -> None:
        """Record an admission, for the device as well."""
        self.admitted.append(sequence)
        self.batch.admitted.append(new_sequence(sequence))

    def add_hit(self, sequence: Sequence, index: int, blocks: list[int]) -> None:
        """Record cached blocks in the block table of a sequence, from `index` on."""
        self.hits.append((sequence, index, blocks))
        self.batch.new_blocks.append((sequence.slot, index, blocks))

    def drop_hits(self, slot: int) -> None:
        """Drop the hits of a slot's last sequence, preempted before it had a row, from the batch."""
        self.batch.new_blocks[:] = [told for told in self.batch.new_blocks if told[0] != slot]

    def add_prefill(self, sequence: Sequence, length: int) -> None:
        """Add a row for the next `length` tokens of a prompt or a recompute.

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
        self.recomputed_tokens += max(0, min(start + length, sequence.num_lost_tokens) - start)
        is_complete = sequence.num_computed_tokens == sequence.num_tokens
        group = sequence.prompt_group
        if (
            group is not None
            and sequence.num_tokens == sequence.num_prompt_tokens
            and (is_complete or group not in self.leaders)
        ):
            self.leaders[group] = row
        if is_complete:
            self._sample(sequence, row)
        sequence.last_step = batch.step

    def add_draft(self, sequence: Sequence, draft: list[int]) -> None:
        """Draft tokens behind the row added last, which samples. They count for nothing in the sequence yet."""
        self.drafts[sequence] = len(draft)
        if draft:
            batch = self.batch
            batch.lengths[-1] += len(draft)
            batch.token_ids += draft
            batch.drafts.append((len(batch.sampled) - 1, draft))

    def add_fork(self, sequence: Sequence, row: int, num_blocks: int) -> Sequence:
        """Fork a sequence: the row that completes the prompt samples for it as well. Its block table has the prompt's
        blocks already; the first `num_blocks` precede the fork. Returns its leader.
        """
        batch, leader, table = self.batch, self.sequences[row], sequence.block_table.blocks
        batch.new_blocks.append((sequence.slot, num_blocks, table[num_blocks:]))
        last = len(table) - 1
        if table[last] != leader.block_table.blocks[last]:
            batch.block_copies.append((leader.block_table.blocks[last], table[last]))
        batch.forks.append((len(batch.sampled), sequence.slot))
        self.forks.append((sequence, leader, num_blocks))
        self._sample(sequence, row)
        sequence.last_step = batch.step
        return leader

    def _sample(self, sequence: Sequence, row: int) -> None:
        sequence.num_tokens += 1
        self.batch.sampled.append(row)
        self.sampled.append(sequence)

    def _bill(self, sequence: Sequence) -> None:
        """Bill prompt tokens computed for the first time: a recompute is free for the tenant."""
        tokens = min(sequence.num_computed_tokens, sequence.num_prompt_tokens) - sequence.num_prefilled_tokens
        if tokens > 0:
            sequence.num_prefilled_tokens += tokens
            self.billed.append((sequence, tokens))

    def undo(self) -> None:
        """Undo the plan of this step, the newest in flight, in its sequences."""
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
    """Return the device's record of a sequence that has sampled nothing since its admission."""
    request = sequence.request
    tokens = [*request.prompt, *sequence.output]
    adapter, table = request.adapter, sequence.adapter_table
    placed = None if adapter is None or table is None else (adapter.number, list(table.blocks))
    return NewSequence(sequence.slot, request.sampling, request.seed, tokens, len(request.prompt), placed)
