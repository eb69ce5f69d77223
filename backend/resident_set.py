"""Sequences that hold a slot and blocks of the device, from their admission until the last step that names them."""

from collections.abc import Iterable

from backend.config import EngineConfig
from backend.counters import Counters
from backend.holdings import Holdings
from backend.passed_over import PassedOver
from backend.sequence import FinishReason, Sequence, Status
from backend.waiting import WaitingQueue


class ResidentSet:
    """Blocks and slot of a sequence that ends or is preempted are released when the last step in flight that names it
    completes, never earlier.
    """

    def __init__(
        self, config: EngineConfig, waiting: WaitingQueue, passed_over: PassedOver, counters: Counters
    ) -> None:
        self.holdings = Holdings(config)
        self.running: dict[str, Sequence] = {}  # in the order of admission
        self.leaving: dict[str, Sequence] = {}  # preempted, and named by steps in flight
        self._waiting = waiting
        self._passed_over = passed_over
        self._counters = counters

    def seat(self, sequence: Sequence) -> None:
        """It runs from now on, in a slot of its own and without blocks."""
        self.holdings.seat(sequence)
        sequence.status = Status.RUNNING
        sequence.num_admitted_tokens = sequence.num_tokens
        self.running[sequence.id] = sequence
        self._counters.joined += 1
        sequence.turn = self._counters.joined

    def suspend(self, sequence: Sequence) -> None:
        """It runs no more, and waits again once its memory is free."""
        sequence.status = Status.PREEMPTED
        del self.running[sequence.id]
        self.leaving[sequence.id] = sequence
        self._release_if_idle(sequence)

    def end(self, sequence: Sequence, reason: FinishReason) -> None:
        """It is over, whether it ran or not."""
        self.running.pop(sequence.id, None)
        self.leaving.pop(sequence.id, None)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        self._release_if_idle(sequence)

    def release(self, sequences: Iterable[Sequence]) -> None:
        """A step that named these is no longer in flight."""
        for sequence in sequences:
            if sequence.status is not Status.RUNNING:
                self._release_if_idle(sequence)

    def _release_if_idle(self, sequence: Sequence) -> None:
        """Free blocks and slot, unless a step in flight still names the sequence; a preempted one waits again."""
        if sequence.in_flight or sequence.slot < 0:
            return
        self.holdings.take_back(sequence)
        self._passed_over.look_again(sequence.tenant)
        if sequence.status is Status.PREEMPTED:
            self._counters.recomputed_tokens += sequence.num_computed_tokens
            sequence.num_computed_tokens = 0
            sequence.status = Status.WAITING
            del self.leaving[sequence.id]
            self._waiting.restore(sequence)

    def of(self, tenant: str) -> list[Sequence]:
        """Those of a tenant that run."""
        return [sequence for sequence in self.running.values() if sequence.tenant == tenant]

    def check_integrity(self, in_flight: Iterable[Sequence]) -> None:
        """Every slot and block is free, or held by exactly one sequence that runs, was preempted or is in flight."""
        self.holdings.check_integrity({*self.running.values(), *self.leaving.values(), *in_flight})
