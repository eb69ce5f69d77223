from hypothesis import given, settings
from hypothesis import strategies as st

from admission.due_order import DueOrder
from backend.scheduler.sequence import Sequence
from tests.backend.sequences import make_sequence
from tests.examples import examples


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans()), max_size=40))
def test_those_that_wait_are_in_the_order_in_which_they_are_due_and_came(steps: list[tuple[int, bool]]) -> None:
    order, waiting = DueOrder(), dict[Sequence, tuple[int, int]]()
    for number, (due, leaves) in enumerate(steps):
        if leaves and waiting:
            left = list(waiting)[number % len(waiting)]
            del waiting[left]
            order.discard(left)
            order.discard(left)
        else:
            sequence = make_sequence(str(number))
            waiting[sequence] = due, number
            order.add(sequence, float(due), tokens=number)
        assert [each for _, _, each, _ in order] == sorted(waiting, key=waiting.__getitem__)
