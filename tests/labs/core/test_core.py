"""The core's invariants in any interleaving; `scripts/prove_core.py` runs far more examples of the same machine."""

from hypothesis import settings

from admission.core import CoreConfig
from tests.examples import examples
from tests.labs.core.core_machine import MAX_WAITING, NAMES, CoreMachine, small_engine

TestCore = CoreMachine.TestCase
TestCore.settings = settings(max_examples=examples(30, at_night=2500), stateful_step_count=30, deadline=None)


def test_a_victim_after_the_first_step_since_a_loss_is_told_its_blocks_for_that_step() -> None:
    machine = CoreMachine()
    weights = dict.fromkeys(NAMES, 1.0)
    config = CoreConfig(weights=weights, prefill_share=0.3, max_waiting=MAX_WAITING)
    machine.start(small_engine(7, 1, None, 1), config)
    machine.arrive("a", 1, 7, 3, None)
    machine.plan()
    machine.complete(1.0)
    machine.arrive("a", 0, 1, 1, None)
    machine.plan()
    machine.arrive("a", 0, 1, 1, None)
    machine.arrive("a", 0, 4, 1, None)
    machine.complete(1.0)
    machine.plan()
    machine.arrive("a", 0, 1, 1, None)
    machine.lose()
    machine.plan()
    assert [sequence.id for sequence in machine.scheduler.preempted] == ["s0"]
    machine.complete(1.0)
    machine.teardown()
