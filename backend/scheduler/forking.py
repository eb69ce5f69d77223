"""Forking lets several answers to one prompt start from one prefill.

The row that completes the prompt is sampled once for each of them, by its own parameters and seed. They share its full
blocks; a partial last block is copied in that very step, behind all of its computation: from the next step on each
answer writes into it. So a lost step loses its copies too (copy-on-write, as forked sequences of Kwon et al., 2023, but
copied at once, because each answer writes at once).
"""

from collections.abc import Iterable
from dataclasses import replace

from backend.adapter import Adapter
from backend.config import EngineConfig
from backend.paged_kv.prefix_cache import CachedBlock
from backend.scheduler.kv_manager import KVManager
from backend.scheduler.prefix_hit import PrefixHit
from backend.scheduler.scheduled_step import PrefillBudget, ScheduledStep
from backend.scheduler.sequence import Sequence, SequenceStatus


def group_by_prompt(sequences: Iterable[Sequence]) -> None:
    """Set `prompt_group` of one tenant's sequences with the same tokens and adapter: the id of the first of them.

    Sequences of a group ask for the same log probabilities of their prompt and share one list of them.

    O(tokens) of distinct lists; a million tokens take some 10 ms.
    """
    first: dict[tuple[Adapter | None, int | None, tuple[int, ...]], Sequence] = {}
    leader: Sequence | None = None
    of_leader: tuple[Adapter | None, int | None] = None, None
    for sequence in sequences:
        request = sequence.request
        key = request.adapter, request.sampling.prompt_logprobs
        if leader is None or request.prompt is not leader.request.prompt or key != of_leader:
            leader = first.setdefault((*key, tuple(request.prompt)), sequence)
            of_leader = key
        if leader is not sequence:
            leader.prompt_group = sequence.prompt_group = leader.id
            sequence.prompt_logprobs = leader.prompt_logprobs


class Forking:
    """Finds the rows of a step from which other answers to the same prompt can start.

    The computing sequence of a group is the leader of the others behind it in the step, which wait for it, in a slot or
    in the queue. In a step without the leader (it has ended, is paused, was preempted) the next sequence computes on.
    """

    def __init__(self, config: EngineConfig, kv_manager: KVManager) -> None:
        self._kv_manager = kv_manager
        self._blocks = kv_manager.blocks
        self._block_size = config.block_size

    def find(self, sequence: Sequence, scheduled: ScheduledStep, budget: PrefillBudget) -> PrefixHit:
        """Return the prefix hit of the sequence: the whole prompt, where it can be forked; else its cached blocks, as
        far as the step has time to copy swapped ones back from the host.

        Where its leader computes the next tokens in this step, the sequence computes none itself.
        """
        hit, swapping = self._find(sequence, scheduled), self._blocks.swapping
        if swapping.host.num_blocks:
            end = sequence.num_computed_tokens + hit.num_blocks * self._block_size
            swapping.fit(hit, end, self._blocks.pool.num_free, budget)
            if hit.is_cut and hit.windows:  # without all of the host's blocks the window is another
                hit = self._find(sequence, scheduled, from_host=False)
        return hit

    def _find(self, sequence: Sequence, scheduled: ScheduledStep, *, from_host: bool = True) -> PrefixHit:
        leaders = scheduled.leaders
        row = leaders.get(sequence.prompt_group) if leaders and sequence.prompt_group is not None else None
        if row is None or not self._may_follow(sequence, leader := scheduled.sequences[row]):
            return self._blocks.find(sequence, scheduled.batch.step, from_host=from_host)
        if leader.num_computed_tokens == leader.num_prompt_tokens:
            hit = self._fork(sequence, leader, row)
            return hit or self._blocks.find(sequence, scheduled.batch.step, from_host=from_host)
        hit = self._blocks.find(sequence, scheduled.batch.step, from_host=from_host)
        return replace(hit, is_being_computed=True, follows_leader=True)

    def takes(self, sequence: Sequence, hit: PrefixHit) -> bool:
        """Return True if this step gives the sequence blocks of the hit. With windows it has them all at once, when no
        other sequence computes on.
        """
        is_awaited = hit.is_being_computed and hit.fork_row is None and self._blocks.windows.groups_of(sequence) > 0
        return hit.num_blocks > 0 and not is_awaited

    def take_hit(self, sequence: Sequence, hit: PrefixHit, scheduled: ScheduledStep) -> None:
        """Give a sequence that holds a slot its hit for this step."""
        before = len(sequence.block_table.blocks)
        if hit.fork_row is not None:
            self._blocks.fork(sequence, hit, scheduled.batch.step)
            leader = scheduled.add_fork(sequence, hit.fork_row, before)
            if self._blocks.windows.groups_of(sequence) and sequence.num_prompt_tokens % self._block_size:
                scheduled.batch.block_copies += self._blocks.windows.copies(leader, sequence)
        elif self.takes(sequence, hit):
            scheduled.add_hit(sequence, before, self._blocks.take_hit(sequence, hit, scheduled.batch.step))

    def _may_follow(self, sequence: Sequence, leader: Sequence) -> bool:
        """Return True if the sequence, which holds whole blocks and is not further than the leader, may start from it.

        Only blocks with names can be shared: without a prefix cache each answer computes the prompt. With windows it
        may hold no blocks.
        """
        length = sequence.num_prompt_tokens
        return (
            self._blocks.shares_blocks
            and leader.status is SequenceStatus.RUNNING
            and (leader.tenant, leader.num_prompt_tokens) == (sequence.tenant, length)
            and leader.block_table.num_told_names >= length // self._block_size
            and sequence.num_tokens == length
            and sequence.num_computed_tokens == len(sequence.block_table.blocks) * self._block_size
            and sequence.num_computed_tokens <= leader.num_computed_tokens
            and not (sequence.block_table.blocks and self._blocks.windows.groups_of(sequence))
        )

    def _fork(self, sequence: Sequence, leader: Sequence, row: int) -> PrefixHit | None:
        """Return the hit with which the sequence starts from this row; None where it cannot share the leader's blocks,
        or lacks memory for one of its own.
        """
        full, rest = divmod(leader.num_prompt_tokens, self._block_size)
        blocks = leader.block_table.blocks[len(sequence.block_table.blocks) : full]
        named = [self._blocks.cache.at(block) for block in blocks]
        shared = [cached for cached in named if cached is not None and cached.name is not None]
        if len(shared) < len(blocks):
            return None
        groups, first, windows = self._blocks.windows.groups_of(sequence), 0, list[CachedBlock]()
        if groups:
            found = self._blocks.windows.fork(leader, full)
            if found is None:
                return None
            first, windows = found
        if sequence.slot >= 0 and rest:
            permits = self._blocks.permits(sequence.tenant, 1 + groups)
            if not permits or self._blocks.num_available <= groups:
                return None
        count = len(shared) + len(windows)
        return PrefixHit(
            shared,
            num_held=count,
            num_paid=count,
            is_being_computed=True,
            follows_leader=True,
            windows=[*windows],
            first_seen=first,
            fork_row=row,
        )
