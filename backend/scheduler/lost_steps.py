"""Recovery from a step for which the device had no memory: smaller steps for a while, and a device that is told
again.
"""

from collections.abc import Iterable

from backend.scheduler.scheduled_step import ScheduledStep, new_sequence
from backend.scheduler.sequence import Sequence, SequenceStatus

RECOVERY_STEPS = 1024  # steps in which a budget of one token grows whole again
MAX_LOSSES_IN_A_ROW = 16  # enough to halve any budget to one token, and to leave sequences waiting for memory


class TokenBudget:
    """The token budget of a step: halved by each lost step, raised a little by each computed one.

    Additive increase with multiplicative decrease finds the fitting size by itself (Chiu and Jain, 1989): the memory of
    a step depends on its shape, and on other uses of the device.
    """

    def __init__(self, most: int) -> None:
        self.tokens = most  # the most of a step, at least one
        self._most = most
        self._size = float(most)
        self._losses = 0  # in a row
        self.is_cut = False  # True if a lost step still limits it

    def computed(self) -> None:
        """Raise the budget: a step was computed."""
        self._losses = 0
        self._resize(min(self._size + self._most / RECOVERY_STEPS, float(self._most)))
        self.is_cut = self._size < self._most

    def halve(self, tokens: int) -> bool:
        """Halve the budget after the loss of a step of `tokens` tokens. Return False after too many losses in a row."""
        self._losses += 1
        self.is_cut = True
        self._resize(max(1.0, min(self.tokens, tokens) / 2))
        return self._losses <= MAX_LOSSES_IN_A_ROW

    def restore(self) -> bool:
        """Restore the whole budget, because nothing fits the cut one. Return True if it was cut."""
        was_less = self._size < self._most
        self._resize(float(self._most))
        return was_less

    def _resize(self, size: float) -> None:
        self._size, self.tokens = size, int(size)


class DeviceResync:
    """Sends the device again sequences and block tables that were not sent, or were lost with a step.

    The device may have applied any part of a lost step, so all of it is sent again.
    """

    def __init__(self) -> None:
        self.untold: list[tuple[Sequence, int, list[int]]] = []  # hits of empty plans, not sent
        self.out_of_sync: list[Sequence] = []  # running at the last lost step, until sent again

    def mark_out_of_sync(self, running: Iterable[Sequence]) -> None:
        self.out_of_sync = list(running)

    def tell_hits(self, scheduled: ScheduledStep) -> None:
        """Add unsent hits to the step, for the sequences of its model that still run with them."""
        model = scheduled.batch.model
        hits, self.untold = self.untold, [hit for hit in self.untold if hit[0].request.model != model]
        for sequence, index, blocks in hits:
            if sequence.request.model != model:
                continue
            held = sequence.block_table.blocks[index : index + len(blocks)]
            if sequence.status is SequenceStatus.RUNNING and held == blocks:
                scheduled.add_hit(sequence, index, blocks)

    def add_to(self, scheduled: ScheduledStep) -> None:
        """Add to the step, ahead of its own changes, the block tables of its model's sequences that still hold a slot,
        and the sequences themselves where nothing was sampled yet.
        """
        model = scheduled.batch.model
        told = [s for s in self.out_of_sync if s.request.model == model]
        kept = [s for s in told if s.slot >= 0 and s not in scheduled.admitted]
        prefilling = [s for s in kept if s.num_prompt_tokens + len(s.output) == s.num_admitted_tokens]
        scheduled.batch.admitted[:0] = [new_sequence(s) for s in prefilling]
        scheduled.batch.new_blocks[:0] = [(s.slot, 0, list(s.block_table.blocks)) for s in kept]
        self.out_of_sync = [s for s in self.out_of_sync if s.request.model != model]
