"""What a random core has to hold, over one run of it each."""

from collections import Counter
from math import isclose
from typing import NamedTuple

from backend.scheduler.sequence import Sequence, SequenceStatus
from tests.backend.sequences import make_sequence
from tests.labs.core.random_core import RandomCore


class Fairness(NamedTuple):
    """What one schedule showed."""

    gap: float
    bound: float
    preemptions: int

    @property
    def share(self) -> float:
        """Of the bound; at most 1."""
        return self.gap / self.bound if self.bound else 0.0


def random_schedule(seed: int, steps: int = 30) -> Fairness:
    """Tenants that mostly have work waiting, held to the fairness bound.

    Raises `AssertionError` when it is exceeded, or charges do not add up to the busy time.
    """
    run = RandomCore(seed)
    for _ in range(24):
        run.arrive()
    for _ in range(steps):
        while len(run.queue) < 12:
            run.arrive()
        run.plan()
        if run.random.random() < 0.1:
            run.finish(run.random.choice(run.sequences))
        run.complete()
    run.monitor.check()
    while run.scheduler.in_flight:
        run.complete()
    assert isclose(run.charged, run.busy, rel_tol=1e-9), f"charged {run.charged}, busy for {run.busy}"
    return Fairness(run.monitor.gap, run.monitor.bound, run.scheduler.counters.preemptions)


def random_cancellations(seed: int, count: int = 100) -> Counter[str]:
    """Cancel at random moments, in every state; return the states they met.

    Raises `AssertionError` when a token comes after the end, memory is not released as it should, or anything is left
    of those that ended: blocks, slots, prepayments or places in the queue.
    """
    run = RandomCore(seed)
    met: Counter[str] = Counter()
    lengths: dict[Sequence, int] = {}
    while met.total() < count:
        while len(run.queue) < 6:
            run.arrive()
        run.plan()
        for _ in range(run.random.randrange(3)):
            sequence = run.random.choice(run.sequences[-24:])
            met[_state(sequence)] += 1
            lengths.setdefault(sequence, len(sequence.output))
            run.finish(sequence)
        _check_release(run, lengths)
        run.complete()
        _check_release(run, lengths)
    run.drain()
    _check_nothing_is_left(run)
    assert all(len(sequence.output) == length for sequence, length in lengths.items()), "a token came after the end"
    return met


def _state(sequence: Sequence) -> str:
    if sequence.status is SequenceStatus.RUNNING:
        prefilling = sequence.num_computed_tokens < sequence.num_admitted_tokens
        return "in prefill" if prefilling else "decoding"
    return sequence.status.name.lower()


def _check_release(run: RandomCore, ended: dict[Sequence, int]) -> None:
    """What ended holds its slot and its blocks as long as a step in flight names it, and no longer."""
    named = {sequence for scheduled in run.scheduler.in_flight for sequence in scheduled.sequences}
    for sequence in ended:
        assert sequence.status is SequenceStatus.FINISHED
        assert (sequence.slot >= 0) == (sequence in named), "memory was released too early or too late"
        assert (sequence.slot >= 0) or not sequence.block_table.blocks


def _check_nothing_is_left(run: RandomCore) -> None:
    run.scheduler.check_integrity()
    assert run.scheduler.kv_manager.pool.num_free == run.engine.num_blocks, "blocks were leaked"
    assert not run.core.ledger.promises, "prepayments were leaked"
    assert len(run.queue) == 0 and run.queue.head() is None, "queue entries were leaked"
    assert all(account.num_open == 0 for account in run.core.share.accounts.values())
    run.queue.set_time(run.now)
    first, last = (run.queue.due(make_sequence("new", "a", 1, 1, priority_class=level)) for level in (0, 2))
    assert first == last, "an urgent class stayed open"
    assert all(sequence.status is SequenceStatus.FINISHED for sequence in run.sequences)
