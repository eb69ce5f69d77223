from hypothesis import given
from hypothesis import strategies as st

from gateway.telemetry.metrics.retry_memory import MOST_CLIENTS, MOST_EACH, RetryMemory


def test_a_client_is_known_to_keep_to_what_it_was_told_or_not() -> None:
    memory = RetryMemory()
    memory.told("k", 0, due=10.0)
    memory.told("k", 0, due=20.0)
    assert memory.came("k", 1, 12.0) is True
    assert memory.came("k", 1, 13.0) is False
    assert memory.came("k", 1, 14.0) is None, "both have come back"


def test_attempts_of_other_keys_and_other_numbers_are_others() -> None:
    memory = RetryMemory()
    memory.told("k", 1, due=10.0)
    assert memory.came("other", 2, 11.0) is None
    assert memory.came("k", 1, 11.0) is None
    assert memory.came("k", 2, 11.0) is True


def test_of_several_it_is_the_one_that_was_due_last() -> None:
    memory = RetryMemory()
    for due in (10.0, 20.0, 30.0):
        memory.told("k", 0, due)
    assert memory.came("k", 1, 25.0) is True
    assert memory.came("k", 1, 15.0) is True
    assert memory.came("k", 1, 25.0) is False


@given(st.lists(st.tuples(st.integers(0, 9000), st.floats(0, 100)), max_size=300))
def test_it_is_bounded(told: list[tuple[int, float]]) -> None:
    memory = RetryMemory()
    for number, due in told:
        memory.told("one", 0, due)
        memory.told(str(number), 0, due)
    assert len(memory._due) <= MOST_CLIENTS
    assert all(len(moments) <= MOST_EACH for moments in memory._due.values())


def test_whoever_was_told_longest_ago_is_forgotten() -> None:
    memory = RetryMemory()
    for number in range(MOST_CLIENTS + 1):
        memory.told(str(number), 0, 0.0)
    assert memory.came("0", 1, 1.0) is None
    assert memory.came("1", 1, 1.0) is True
