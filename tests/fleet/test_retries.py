from hypothesis import given
from hypothesis import strategies as st

from fleet.retries import (
    FIRST_SECONDS,
    MAX_FAILURES_IN_A_ROW,
    MOST_SECONDS,
    RESERVE_ATTEMPTS,
    RETRY_SHARE,
    Ejection,
    RetryBudget,
)


@given(st.lists(st.booleans(), max_size=400))
def test_retries_are_a_tenth_of_requests_and_a_reserve_however_they_come(fails: list[bool]) -> None:
    budget, granted = RetryBudget(), 0
    for number, fail in enumerate(fails, 1):
        budget.requested("t")
        granted += fail and budget.take("t")
        assert granted <= RESERVE_ATTEMPTS + RETRY_SHARE * number + 1e-6
    assert budget.taken == granted


def test_a_fleet_that_fails_for_long_is_not_asked_twice_as_much() -> None:
    budget = RetryBudget()
    for _ in range(1000):
        budget.requested("t")
        budget.take("t")
    assert budget.taken <= RESERVE_ATTEMPTS + 100


def test_a_tenant_whose_requests_fail_leaves_others_their_second_attempts() -> None:
    budget = RetryBudget()
    while budget.take("fails"):
        budget.requested("fails")
    assert not budget.is_left_for_all
    assert [budget.take("other") for _ in range(round(RESERVE_ATTEMPTS) + 1)] == [True] * round(RESERVE_ATTEMPTS) + [
        False
    ]
    for _ in range(200):
        for tenant in ("fails", "other"):
            budget.requested(tenant)
    assert budget.is_left_for_all and not budget._owed


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 10)), max_size=80))
def test_it_is_left_out_after_failures_in_a_row_and_always_comes_back(events: list[tuple[bool, float]]) -> None:
    ejection, now, row = Ejection(), 0.0, 0
    for success, passed in events:
        now += passed
        was_out = ejection.is_out(now)
        if success:
            ejection.succeeded()
            row = 0
        else:
            ejection.failed(now)
            row += 1
        assert ejection.is_out(now) == (not success and (was_out or row >= MAX_FAILURES_IN_A_ROW))
        assert ejection.until <= now + MOST_SECONDS


def test_each_time_twice_as_long() -> None:
    ejection, now, lengths = Ejection(), 0.0, []
    for _ in range(MAX_FAILURES_IN_A_ROW - 1):
        ejection.failed(now)
    for _ in range(8):
        ejection.failed(now)
        lengths.append(ejection.until - now)
        now = ejection.until
    assert lengths == [min(FIRST_SECONDS * 2**n, MOST_SECONDS) for n in range(8)]
