"""The spare class waits behind all others, is held apart from them, and gives back what its own tenant needs."""

from admission.core import CoreConfig, MemoryGate
from backend.scheduler.scheduled_step import WaitReason
from backend.scheduler.sequence import SPARE_CLASS, SequenceStatus
from tests.admission.staged_core import StagedCore

GREEDY = CoreConfig(memory=MemoryGate.OPTIMISTIC)


def test_a_tenant_that_is_held_for_its_batches_is_not_held_for_the_rest() -> None:
    stage = StagedCore(GREEDY, max_num_seqs=1)
    queue = stage.scheduler.waiting
    spare = stage.arrive("spare", priority_class=SPARE_CLASS)
    assert queue.head() is spare
    queue.hold("a", WaitReason.ALLOWANCE)
    assert queue.head() is None
    other = stage.arrive("other")
    assert queue.head() is other
    queue.remove(other)
    assert queue.head() is None
    queue.hold("a", None)
    assert queue.head() is spare and len(queue) == 1


def test_a_tenant_at_its_lease_takes_blocks_back_from_its_batches() -> None:
    stage = StagedCore(GREEDY)
    stage.allow("a", 8)
    spare = [stage.arrive(f"spare-{n}", prompt=8, output=16, priority_class=SPARE_CLASS) for n in range(2)]
    for _ in range(5):
        stage.step()
    assert any(one.status is SequenceStatus.RUNNING for one in spare)
    own = stage.arrive("own", prompt=20, output=8)
    for _ in range(4):
        stage.step()
    assert own.output and all(one.status is not SequenceStatus.RUNNING for one in spare)
    stage.run()
    assert all(len(one.output) == 16 for one in spare), "nothing is lost"


def test_batches_neither_fill_queues_nor_make_debts_nor_teach_lengths() -> None:
    stage = StagedCore(CoreConfig(max_waiting=2), max_num_seqs=2)
    for n in range(20):
        stage.arrive(f"spare-{n}", output=30, priority_class=SPARE_CLASS)
    assert stage.core.backlog.total.count == 0
    stage.run()
    assert stage.core.credit("a") == 0.0 and stage.core.ledger.spare.account("a").charged > 0.0
    assert not stage.core.lengths.knows("a", 30)


def test_a_request_that_its_tenant_s_allowance_holds_costs_the_lines_of_others_nothing() -> None:
    stage = StagedCore(GREEDY)
    stage.allow("a", 0)
    line = stage.arrive("line", tenant="night", output=16, priority_class=SPARE_CLASS)
    stage.step()
    own = stage.arrive("own", tenant="a")
    for _ in range(8):
        stage.step()
    assert own.status is SequenceStatus.WAITING
    assert len(line.output) > 6 and line.num_preemptions == 0
