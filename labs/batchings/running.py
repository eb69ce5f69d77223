"""The running sequences of a step by their kind of row, for rules that choose among them."""

from backend.scheduler.batching import StepParts
from backend.scheduler.scheduled_step import ScheduledStep, WaitReason
from backend.scheduler.sequence import Sequence, SequenceStatus


def prefilling(parts: StepParts) -> list[Sequence]:
    return [s for s in _running(parts) if s.num_computed_tokens < s.num_admitted_tokens and not s.jumps]


def jumping(parts: StepParts) -> list[Sequence]:
    """Return the running sequences with uncomputed forced tokens."""
    return [s for s in _running(parts) if s.num_computed_tokens < s.num_admitted_tokens and s.jumps]


def ready(parts: StepParts, scheduled: ScheduledStep) -> list[Sequence]:
    """Return the decodes that may run, and record the decodes paused at a limit of their tenants."""
    decodes = list[Sequence]()
    for sequence in _running(parts):
        is_decode = sequence.num_admitted_tokens <= sequence.num_computed_tokens < sequence.num_tokens
        if is_decode and sequence.num_tokens != sequence.token_limit:
            decodes.append(sequence)
        elif is_decode and sequence.num_tokens < sequence.request.most_tokens:
            scheduled.paused[sequence] = WaitReason.TOKENS
    return decodes


def add_decodes(parts: StepParts, sequences: list[Sequence], scheduled: ScheduledStep, most: int) -> None:
    """Add the next token of each of these sequences with memory for it, before all prefills, at most `most`."""
    rows = list[Sequence]()
    for sequence in sequences:
        if len(rows) < most and sequence.status is SequenceStatus.RUNNING:
            parts.kv_manager.blocks.name_known(sequence)
            if parts.rows.grow(sequence, 1, scheduled):
                rows.append(sequence)
    _add_rows([sequence for sequence in rows if sequence.status is SequenceStatus.RUNNING], scheduled)


def _add_rows(sequences: list[Sequence], scheduled: ScheduledStep) -> None:
    """Add a row for the next token of each sequence, behind the present decodes and before all prefills."""
    batch, first, count = scheduled.batch, scheduled.batch.num_decodes, len(sequences)
    starts = [sequence.num_computed_tokens for sequence in sequences]
    batch.slots[first:first] = [sequence.slot for sequence in sequences]
    batch.starts[first:first] = starts
    batch.lengths[first:first] = [1] * count
    batch.sampled = [*range(first + count), *[row + count for row in batch.sampled[first:]]]
    batch.forks = [(index + count, slot) for index, slot in batch.forks]
    batch.num_decodes = first + count
    scheduled.sequences[first:first] = sequences
    scheduled.sampled[first:first] = sequences
    scheduled.leaders = {group: row + count for group, row in scheduled.leaders.items()}
    scheduled.decode_context += sum(starts) + count
    for sequence in sequences:
        sequence.num_computed_tokens += 1
        sequence.num_tokens += 1
        sequence.last_step = batch.step


def _running(parts: StepParts) -> list[Sequence]:
    return list(parts.kv_manager.running.values())
